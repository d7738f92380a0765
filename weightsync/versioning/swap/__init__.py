"""How a verified slot becomes the live weights, one file for each mode behind `weightsync.versioning.swap.mode`.

Each takes the server's tensors and verified slots, gives live weights, and promises that a failed swap changes nothing.
"""
