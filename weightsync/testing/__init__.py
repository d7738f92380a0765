"""For those who write transports: the conformance suite that ours pass too.

Takes the name of an installed transport, gives pytest tests, promises that a transport that passes behaves like the
others. Needs pytest.
"""
