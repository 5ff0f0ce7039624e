"""A verdict: what is wrong, culprits, victims, and the evidence.

Runs in:  the agent that leads; everything that shows a verdict reads the same fields. Pure.
"""

from collections.abc import Iterable
from enum import Enum
from typing import Any

import msgspec


class VerdictKind(Enum):
    """Kinds of problems; docs/verdicts.md has a section for each."""

    CRASH = "crash"
    OUT_OF_MEMORY = "out of memory"
    NODE_LOST = "node lost"
    FROZEN = "frozen"
    HANG_IN_COMPUTATION = "hang in computation"
    HANG_IN_COMMUNICATION = "hang in communication"
    SKIPPED_COLLECTIVE = "skipped collective"
    DEADLOCK = "deadlock"
    GIL_STUCK = "GIL stuck"
    BUSY_LOOP = "busy loop"
    INPUT_BOUND = "input-bound"
    SLOW_COMPUTATION = "slow computation"
    SLOW_COMMUNICATION = "slow communication"
    MEMORY_CREEPING = "memory creeping"
    BAD_NUMBERS = "bad numbers"
    REPLICAS_DIFFER = "replicas differ"
    FAILING_NODE = "failing node"


class Confidence(Enum):
    """Confidence of a verdict."""

    CERTAIN = "certain"
    LIKELY = "likely"
    POSSIBLE = "possible"


class Verdict(msgspec.Struct, frozen=True):
    """One diagnosis."""

    kind: VerdictKind
    culprits: tuple[int, ...]
    """Ranks. Empty if the culprit is a node or a link, see `nodes`."""
    text: str
    """One sentence."""
    nodes: tuple[str, ...] = ()
    """Culprit nodes; for a link, both its ends."""
    victims: tuple[int, ...] = ()
    """Ranks that only wait for the culprits."""
    evidence: tuple[str, ...] = ()
    against: tuple[str, ...] = ()
    """Counter-evidence: facts that support another explanation."""
    sure: Confidence = Confidence.LIKELY
    has_leave: bool = False
    """The culprits are in a phase that may take long, by their own report or by their stack."""
    acts_at_once: bool = False
    """There is positive evidence, so that a longer wait would not change the diagnosis."""
    fingerprint: str = ""
    """Equal for the same fault at the same location."""

    def as_json(self) -> dict[str, Any]:
        return msgspec.to_builtins(self)  # type: ignore[no-any-return]


def ranks_in_words(ranks: Iterable[int]) -> str:
    """`rank 3`, `ranks 1 and 2`, `ranks 0 to 6`, `12 ranks`."""
    found = sorted(ranks)
    if len(found) == 1:
        return f"rank {found[0]}"
    if len(found) > 2 and found[-1] - found[0] == len(found) - 1:
        return f"ranks {found[0]} to {found[-1]}"
    if len(found) <= 8:
        return f"ranks {', '.join(str(one) for one in found[:-1])} and {found[-1]}"
    return f"{len(found)} ranks"
