"""Identifiers of runs, ranks, generations, steps and snapshots.

A rank is a slot, and a worker is the process that fills it. The slot keeps its number; each new
process in it is the next incarnation. A `Version` names a snapshot by the generation that took it
and the step after which it was taken. The generation is needed because a step that is repeated
after a restart is another version than the lost one.
"""

from dataclasses import dataclass
from typing import NewType

RunId = NewType("RunId", str)  # of one `ftrun run`; part of paths: letters, digits, `._-`
Rank = NewType("Rank", int)  # global index of a slot, 0 <= rank < world_size
Generation = NewType("Generation", int)
"""Number of earlier starts of the worker group. The user's program sees it as
TORCHELASTIC_RESTART_COUNT. It is the fencing token in every message, arena header and store."""

Incarnation = NewType("Incarnation", int)  # number of earlier processes in this role, in this run
Step = NewType("Step", int)  # boundaries passed: a snapshot of step 8 is the state after 8 steps


@dataclass(frozen=True, slots=True, order=True)
class Version:
    """Names one snapshot of the whole run; a later generation is newer, whatever its step."""

    generation: Generation
    step: Step

    def __str__(self) -> str:
        of = f"generation {self.generation}" if self.generation >= 0 else "from a checkpoint"
        return f"step {self.step} ({of})"


def version(generation: int, step: int) -> Version:
    return Version(Generation(generation), Step(step))
