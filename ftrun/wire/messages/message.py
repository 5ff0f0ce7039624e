"""Base classes of the messages between processes."""

import msgspec


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all messages. Each states its tag, so that its class can be renamed."""


class VersionMessage(Message, frozen=True):
    """Base of messages about one version."""

    generation: int
    step: int
