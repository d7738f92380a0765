"""The trainer's side: shards in, sealed slots out.

Takes tensors once (`register`) and a call after each optimizer step (`publish`); gives a ticket that follows the
version through the fleet; promises that the trainer may change its tensors as soon as `publish` returns.
"""
