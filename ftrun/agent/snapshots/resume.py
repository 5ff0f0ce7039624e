"""Chooses the sources of a checkpoint to resume from, as set by `--resume`.

Runs in:  agent, main thread; each time a generation finds nothing in memory to resume from.
Takes in: the spec, the life of the run.
Gives:    sources, in the order in which they are tried.

Rule 1: the checkpoints of the run itself come first. With `never` or a path, a failure after its
        first checkpoint does not take the run back to its start.
Rule 2: checkpoints of other runs in the directory count with `auto` only, also later in the run.
"""

import os
from dataclasses import dataclass

from ftrun.config.run_spec import RunSpec
from ftrun.urls import is_url, without_password
from ftrun.wire.messages.checkpoint import INDEX_NAME


@dataclass(frozen=True, slots=True)
class CheckpointSource:
    """A directory of checkpoints, or its URL, and which of them count."""

    directory: str
    only: str = ""
    """The name of one checkpoint; empty: any."""
    life: str = ""
    """The life of the run that has written it; empty: any."""

    @property
    def why_none(self) -> str:
        where = without_password(self.directory)
        if self.life:
            return f"this run has written no checkpoint in {where} yet"
        return f"no checkpoint in {where} yet"


def sources_of(spec: RunSpec, life: str, *, has_committed: bool) -> list[CheckpointSource]:
    """The sources, in the order in which they are tried.

    Args:
        spec: of the run.
        life: of the run; see `GenerationPlan.life`.
        has_committed: the run has committed snapshots. If it then writes no checkpoints, the
            checkpoint that it started from is no source, because it would silently discard all
            later steps.
    """
    directory, path = spec.checkpoint_directory, spec.resume_path
    is_auto = spec.profile.checkpoint.resume == "auto"
    found = [CheckpointSource(directory, life="" if is_auto else life)] if directory else []
    if path is not None and (directory or not has_committed):
        found.append(_named(path))
    return found


def _named(path: str) -> CheckpointSource:
    """One checkpoint, or a directory of them; the last part of a URL says which of the two."""
    if is_url(path):
        directory, _, name = path.rstrip("/").rpartition("/")
        is_one = name == "latest" or name.startswith("step-")
        return CheckpointSource(directory, only=name) if is_one else CheckpointSource(path)
    real = os.path.realpath(path)  # DIR/latest is a link
    if os.path.exists(os.path.join(real, INDEX_NAME)):
        directory, name = os.path.split(real)
        return CheckpointSource(directory, only=name)
    return CheckpointSource(real)
