"""The layout that a script declares: a mesh of its ranks, and sharding rules for plain tensors.

Runs in:  worker, inside `attach`; also under plain python, where the file is only read.
Takes in: a file of sharding rules, if there is one; sizes of mesh axes; the world size.
Gives:    the rules on the mesh of this run, and their form in a snapshot.

DTensors need no rules. A mesh without a file declares which ranks see the same data, because
DTensors do not contain that.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftrun.errors import UsageError
from ftrun.sharding.rule_parser import carried, read_carried, read_rules
from ftrun.sharding.rules import ShardingRules


@dataclass(frozen=True)
class DeclaredSharding:
    """The declared layout of this run.

    Args:
        rules: on the mesh of this run.
    """

    rules: ShardingRules

    @property
    def has_rules(self) -> bool:
        return bool(self.rules.rules or self.rules.homes)

    @property
    def saved(self) -> dict[str, object]:
        return carried(self.rules)

    def is_that_of(self, saved: Mapping[str, Any] | None) -> bool:
        """Whether a snapshot is of this layout; a snapshot without a layout counts as such."""
        return saved is None or read_carried(saved).layout == self.rules.layout


def declared(
    path: str | Path | None, mesh: Mapping[str, int] | None, world_size: int | None
) -> DeclaredSharding:
    """Read the rules of this run.

    Args:
        path: of the file; None: there are no rules, and `mesh` has all axes.
        mesh: sizes of axes that differ from those in the file.
        world_size: of this run; the batch axis is resized to fit it. None: not known.

    Raises:
        UsageError: the file has mistakes, or its mesh does not fit.
    """
    rules = read_rules(_text_of(path, mesh or {}), source=str(path or "mesh"))
    if unknown := [name for name in mesh or {} if name not in rules.mesh.names]:
        raise UsageError(f"mesh has {unknown[0]}, and {path} has {rules.mesh}")
    fitted = rules.mesh.having(mesh or {})
    if world_size is not None and fitted.size != world_size:
        resized = fitted.resized(world_size)
        if resized is None:
            raise UsageError(
                f"{rules.source} has a mesh of {fitted.size} ranks ({fitted}), and there are "
                f"{world_size}: say the sizes of its axes, such as mesh={{'tp': 2}}"
            )
        fitted = resized
    return DeclaredSharding(rules.on(fitted))


def _text_of(path: str | Path | None, mesh: Mapping[str, int]) -> str:
    if path is not None:
        try:
            return Path(path).read_text()
        except OSError as error:
            raise UsageError(f"layout={str(path)!r}: {error.strerror}") from error
    if any(size < 1 for size in mesh.values()):
        raise UsageError(f"mesh={dict(mesh)}: its axes have sizes of 1 and more")
    batches = [name for name in mesh if name.startswith("dp")]
    return json.dumps({"mesh": dict(mesh), "batches": batches})
