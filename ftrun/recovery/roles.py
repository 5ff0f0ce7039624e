"""What an agent can be doing about the others.

Runs in:  every agent. Pure.

    JOINING    looks for the run, at the endpoint or at an address it was told
    GATHERING  listens at the endpoint itself, and knows of no run
    FOLLOWING  has a lead: as a member, as a spare, or beside the generation
    SEEKING    has lost its lead, and waits for the next one in order to propose
    LEADING    leads, or proposes itself
    ENDED      was told that the run is over, or has given up
"""

from enum import Enum


class Role(Enum):
    """What an agent is doing about the others."""

    JOINING = "joining"
    GATHERING = "gathering"
    FOLLOWING = "following"
    SEEKING = "seeking"
    LEADING = "leading"
    ENDED = "ended"
