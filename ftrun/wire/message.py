"""The base of all messages.

Runs in: every process. Pure.
"""

import msgspec


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Base of all messages; the tag on the wire is the name of the class."""
