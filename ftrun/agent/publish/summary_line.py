"""The summary of the status: present activity, and the effect of the next node loss. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ProtectionSummary:
    """Numbers of nodes and votes that determine which losses the run tolerates now."""

    members: int
    """They run ranks."""
    spares: int
    min_nodes: int
    """With fewer members, the run pauses."""
    voters: int
    """Of the next generation, including a witness that votes; `votes` of them can vote now."""
    votes: int
    survives: int
    """Nodes of each protection group whose state can be rebuilt."""
    groups: int
    committed: int | None
    """Step that a restart restores."""
    unprotected: str = ""
    """Why a part of the state is in no snapshot."""
    earlier: int | None = None
    """Generation whose protection of the restored version still counts; -1: it had none.

    None: the present generation has protected a version."""

    @property
    def trains_without(self) -> int:
        """Number of nodes that may be lost at once while training can continue."""
        replaceable = self.spares + max(0, self.members - self.min_nodes)
        # A majority of all voters decides, and lost voters still count.
        return max(0, min(self.survives, replaceable, self.votes - (self.voters // 2 + 1)))


@dataclass(frozen=True, slots=True)
class Activity:
    """Present activity of the ranks."""

    step: int
    start_step: int
    """Of the version from which this generation starts."""
    has_stepped: bool
    """In this generation."""
    unresponsive_s: float | None = None
    """Seconds without a step while a hang is suspected."""
    hang: str = ""
    """Text of the verdict; empty: no verdict yet."""
    end: str = ""
    """`stopping` or `ending` if the run is about to end."""


def activity_text(now: Activity, where: str) -> str:
    """Return text such as "running at step 80 on 2 nodes"; `where` is the part after "on"."""
    step = f"step {max(now.step, now.start_step):,}"
    if now.end:
        return f"{now.end} at {step} on {where}"
    if now.unresponsive_s is not None:
        reason = f": {now.hang}" if now.hang else ": a hang is suspected"
        return f"NO STEP for {now.unresponsive_s:.0f} s at {step} on {where}{reason}"
    if not now.has_stepped:
        return f"starting from {step} on {where}, no step yet"
    return f"running at {step} on {where}"


def retained_text(step: int) -> str:
    return f"if a rank is killed now, training resumes from step {step:,}"


def next_loss_text(has: ProtectionSummary) -> str:
    """Describe the effect of the next node loss on the training, not only on the data."""
    if has.unprotected:
        return f"UNPROTECTED: {has.unprotected}"
    if has.committed is None:
        return "no snapshot is protected yet"
    step = f"{has.committed:,}"
    if has.survives < 1:
        until = "" if has.earlier is None else " until this generation has protected it"
        return (
            f"{retained_text(has.committed)}, but the state of a lost node cannot be rebuilt{until}"
        )
    count = has.trains_without
    if count < 1:
        return (
            "the next lost node pauses the run until a node joins; its state is kept at step "
            f"{step}"
        )
    noun = "node" if count == 1 else "nodes"
    of_each = " of each group" if has.groups > 1 and count == has.survives else ""
    by = "" if has.earlier is None else f", as protected in generation {has.earlier}"
    return f"survives any {count} {noun}{of_each}, back to step {step}{by}"
