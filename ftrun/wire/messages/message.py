"""The base of all messages.

Runs in: every process. Pure.
"""

import msgspec


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all messages. Each states its tag, so that a class can be renamed."""
