"""Calls between processes: msgpack over ZMQ, one outcome a call."""
