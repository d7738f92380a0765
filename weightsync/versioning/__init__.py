"""Versions on the server: slots and their states, the gate between forward passes, and the ways to swap.

Takes verified slots, gives live weights, promises that a pass between two steps of the gate sees one version only.
"""
