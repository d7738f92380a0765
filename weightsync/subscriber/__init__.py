"""The server's side: follow a publisher, receive and verify versions, make them live between forward passes.

Takes an address and the server's tensors, gives steps that pin one version, promises that whatever a peer does the
version that is live keeps serving.
"""
