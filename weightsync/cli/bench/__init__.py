"""`weightsync bench`: what a sync takes here, or between two hosts."""
