"""Processes of a node: started, watched, and ended together with all they fork."""
