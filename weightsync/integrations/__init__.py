"""Shard producers, one per way of storing a model: leaves that nothing else in the library imports.

Takes a framework's own parameters, gives `weightsync.Shard`s that view them, and promises that names, shapes and
boxes are those of the Hugging Face checkpoint, or an error that lists everything that does not fit.
"""
