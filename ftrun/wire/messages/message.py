"""Base class of the messages between processes."""

import msgspec


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all messages. Each states its tag, so that its class can be renamed."""
