"""`weightsync demo`: real training and real serving on one machine, in step.

Takes a few options (`command.py`), gives a live view, a summary that proves its claims, and files.
Promises that every number shown was measured in this run, and that no process outlives it.
"""
