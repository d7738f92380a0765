"""`weightsync doctor`: what works on this host, what the rest costs, and how to get it.

Takes nothing, gives findings, promises that what it calls working was really done here, not read from a
version.
"""
