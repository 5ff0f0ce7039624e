"""Names for the things a run is made of.

Runs in: every process.

A rank is a slot; a worker is the process that fills it. The slot keeps its number; each new
process in it is the next incarnation. A snapshot is named by its `Version`: the generation that
took it and the step after which it was taken, because a step that is repeated after a restart
is another version than the one that was lost.
"""

from dataclasses import dataclass
from typing import NewType

RunId = NewType("RunId", str)
"""Name of one `ftrun run`, with all its restarts. Part of paths: letters, digits, `._-`."""

Rank = NewType("Rank", int)
"""Global index of a slot, 0 <= rank < world_size."""

Generation = NewType("Generation", int)
"""How many times the worker group has been started before. Shown to the user's program as
TORCHELASTIC_RESTART_COUNT; the fencing token in every message, arena header and store."""

Incarnation = NewType("Incarnation", int)
"""How many processes have filled this role before this one, in this run."""

Step = NewType("Step", int)
"""Step boundaries passed. A snapshot of step 8 is the state after eight whole steps."""


@dataclass(frozen=True, slots=True, order=True)
class Version:
    """One snapshot of the whole run: later generations are newer, whatever their step."""

    generation: Generation
    step: Step

    def __str__(self) -> str:
        of = f"generation {self.generation}" if self.generation >= 0 else "from a checkpoint"
        return f"step {self.step} ({of})"


def version(generation: int, step: int) -> Version:
    """A `Version` from plain numbers, as they come off the wire."""
    return Version(Generation(generation), Step(step))
