"""What publisher and subscriber share: layouts, plans, messages, the coordinator, and transports.

Takes layouts and slots, gives plans and data paths, promises that nothing a peer sends can crash or block this side.
"""
