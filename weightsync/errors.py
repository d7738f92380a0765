"""Every error this library raises. The class tells the caller what to do; the text tells what happened.

WeightSyncError
  ConfigError            fix an argument or an address
    AddressInUseError    another publisher is alive there
    CapacityError        give it more memory, or publish less
  LayoutError            the two sides disagree about names, shapes, dtypes or boxes
  UsageError             calls in an order that can't work
  FencedError            another publisher took over: stop publishing
  NotReadyError          no verified version yet: retry later
  SyncTimeoutError       a deadline passed; the text names who was missing
  TransportError         the path to a peer broke: only close() is legal on it, reconnect
  ProtocolError          a peer sent something that is not ours
  VersionError           this version was refused; the previous one still serves
    DigestError          its bytes are wrong
    EvictedError         its slot was reused before it was read
"""

from __future__ import annotations


class WeightSyncError(Exception):
    """Base of all errors raised by weightsync."""


class ConfigError(WeightSyncError):
    """An argument, address or environment can't work as given."""


class AddressInUseError(ConfigError):
    """Another process holds the address; the text names it."""


class CapacityError(ConfigError):
    """The host lacks the memory for what was asked."""


class LayoutError(WeightSyncError):
    """Publisher and subscriber disagree about tensors; the text lists every disagreement."""


class UsageError(WeightSyncError):
    """A call that is not legal in this state."""


class FencedError(WeightSyncError):
    """This publisher was replaced by one with a newer epoch and may not publish any more."""


class NotReadyError(WeightSyncError):
    """No verified version is there yet; retrying later may work."""


class SyncTimeoutError(WeightSyncError, TimeoutError):
    """A wait reached its deadline; the text names who was missing."""


class TransportError(WeightSyncError):
    """A data path broke. After it only `close()` is legal on that path."""


class ProtocolError(WeightSyncError):
    """A peer sent bytes that are not a valid message of this schema."""


class VersionError(WeightSyncError):
    """One version was refused. The version that was live before still is."""


class DigestError(VersionError):
    """The bytes received are not the bytes published; the text names the tensors."""


class EvictedError(VersionError):
    """The publisher reused the slot before it was read completely."""
