"""Where a run looks for a checkpoint to go on from, as `--resume` says it.

Runs in:  agent, main thread; each time a generation finds nothing in memory to go on from.
Takes in: the spec, the life of the run.
Gives:    places to look in, one after the other.

Rule 1: what the run has written itself comes first: with `never` or a path, a failure after its
        first checkpoint does not take it back to where it began.
Rule 2: what others have left in the directory counts with `auto` only, also later on.
"""

import os
from dataclasses import dataclass

from ftrun.config import RunSpec
from ftrun.urls import is_url, without_password
from ftrun.wire.messages.checkpoint import INDEX_NAME


@dataclass(frozen=True, slots=True)
class CheckpointSource:
    """A directory of checkpoints, or its URL, and which of them count."""

    directory: str
    only: str = ""
    """The name of one; empty: any."""
    life: str = ""
    """Of the run that has written it; empty: any."""

    @property
    def why_none(self) -> str:
        """In words, where there is none."""
        where = without_password(self.directory)
        if self.life:
            return f"this run has written no checkpoint in {where} yet"
        return f"no checkpoint in {where} yet"


def sources_of(spec: RunSpec, life: str, *, has_committed: bool) -> list[CheckpointSource]:
    """Where to look, in order.

    Args:
        spec: of the run.
        life: of the run; see `Plan.life`.
        has_committed: the run had snapshots. Where it writes no checkpoints, the one that it began
            with is no way out then: that would throw away in silence what was done since.
    """
    directory, path = spec.checkpoint_directory, spec.resume_path
    is_auto = spec.profile.checkpoint.resume == "auto"
    found = [CheckpointSource(directory, life="" if is_auto else life)] if directory else []
    if path is not None and (directory or not has_committed):
        found.append(_named(path))
    return found


def _named(path: str) -> CheckpointSource:
    """One checkpoint, or a directory of them. A URL says by its last part which of the two."""
    if is_url(path):
        directory, _, name = path.rstrip("/").rpartition("/")
        is_one = name == "latest" or name.startswith("step-")
        return CheckpointSource(directory, only=name) if is_one else CheckpointSource(path)
    real = os.path.realpath(path)  # DIR/latest is a link
    if os.path.exists(os.path.join(real, INDEX_NAME)):
        directory, name = os.path.split(real)
        return CheckpointSource(directory, only=name)
    return CheckpointSource(real)
