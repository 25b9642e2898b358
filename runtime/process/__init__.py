"""Starts and watches processes of a node, and ends them together with everything that they fork."""
