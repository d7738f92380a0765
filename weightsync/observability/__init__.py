"""What can be seen of a sync: percentiles of pauses and latencies.

Takes samples, gives numbers, promises not to touch the process's logging.
"""
