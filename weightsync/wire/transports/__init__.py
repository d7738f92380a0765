"""Data paths, one file each, behind `weightsync.wire.transport`.

Each takes slots on the publisher's side and fills a subscriber's back buffer; all behave alike, and differ in `Caps`.
"""
