"""The first line of status: what the run does now, and what the next loss does to the training.

Runs in:  agent. Pure.
Takes in: the numbers of a run over several nodes.
Gives:    one sentence.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Protection:
    """How much may be lost now.

    Args:
        members: nodes that run ranks.
        spares: nodes that may take over.
        min_nodes: with fewer members the run pauses.
        voters: all nodes that decide about the next generation, and a witness that votes.
        votes: those of them that are here.
        survives: nodes of each group whose state can be rebuilt.
        groups: protection groups.
        committed: the step to which a restart goes back; None: nothing is committed.
        unprotected: why a part of the state is in no snapshot.
    """

    members: int
    spares: int
    min_nodes: int
    voters: int
    votes: int
    survives: int
    groups: int
    committed: int | None
    unprotected: str = ""

    @property
    def trains_without(self) -> int:
        """So many nodes may be lost at once and training continues."""
        replaceable = self.spares + max(0, self.members - self.min_nodes)
        # A majority of all voters decides, also of those that are lost.
        return max(0, min(self.survives, replaceable, self.votes - (self.voters // 2 + 1)))


@dataclass(frozen=True, slots=True)
class Activity:
    """What the ranks do.

    Args:
        step: the largest step boundary of any rank.
        start_step: of the version that this generation starts from.
        has_stepped: a rank has made a step in this generation.
        silent_s: time without a step while a hang is suspected; None: it is not.
        hang: the verdict on it; empty: there is none yet.
        end: `stopping` or `ending` if the run is about to end; else empty.
    """

    step: int
    start_step: int
    has_stepped: bool
    silent_s: float | None = None
    hang: str = ""
    end: str = ""


def activity_words(now: Activity, where: str) -> str:
    """Such as "running at step 80 on 2 nodes"; `where` is the part after "on"."""
    step = f"step {max(now.step, now.start_step):,}"
    if now.end:
        return f"{now.end} at {step} on {where}"
    if now.silent_s is not None:
        why = f": {now.hang}" if now.hang else ": a hang is suspected"
        return f"NO STEP for {now.silent_s:.0f} s at {step} on {where}{why}"
    if not now.has_stepped:
        return f"starting from {step} on {where}, no step yet"
    return f"running at {step} on {where}"


def next_loss_words(has: Protection) -> str:
    """What the next lost node does to the training, not only to the data."""
    if has.unprotected:
        return f"UNPROTECTED: {has.unprotected}"
    if has.committed is None:
        return "no snapshot is protected yet"
    step = f"{has.committed:,}"
    if has.survives < 1:
        return f"a killed rank costs the steps since {step}, a lost node all"
    count = has.trains_without
    if count < 1:
        return (
            "the next lost node pauses the run until a node joins; its state is kept at step "
            f"{step}"
        )
    noun = "node" if count == 1 else "nodes"
    of_each = " of each group" if has.groups > 1 and count == has.survives else ""
    return f"survives any {count} {noun}{of_each}, back to step {step}"
