"""The layout that a script declares for its plain tensors.

Runs in:  worker, inside `attach`; also under plain python, where the file is only read.
Takes in: a file of layout rules, sizes of axes, how many ranks there are.
Gives:    the rules on the mesh of this run, and what a snapshot carries of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftrun.errors import UsageError
from ftrun.layouts.rule_file import carried, read_carried, read_rules
from ftrun.layouts.rules import Rules


@dataclass(frozen=True)
class Declared:
    """The layout of this run, as the script says it.

    Args:
        rules: on the mesh of this run.
    """

    rules: Rules

    @property
    def saved(self) -> dict[str, object]:
        """What a snapshot carries of it."""
        return carried(self.rules)

    def is_that_of(self, saved: Mapping[str, Any] | None) -> bool:
        """Whether a snapshot is of this layout; one that carries none is taken to be."""
        return saved is None or read_carried(saved).layout == self.rules.layout


def declared(path: str | Path, mesh: Mapping[str, int] | None, world_size: int | None) -> Declared:
    """Read the rules of this run.

    Args:
        path: of the file.
        mesh: sizes of axes that are other than in the file.
        world_size: of this run; the axis of batches is made to fit. None: not known.

    Raises:
        UsageError: the file has mistakes, or its mesh does not fit.
    """
    try:
        text = Path(path).read_text()
    except OSError as error:
        raise UsageError(f"layout={str(path)!r}: {error.strerror}") from error
    rules = read_rules(text, source=str(path))
    if unknown := [name for name in mesh or {} if name not in rules.mesh.names]:
        raise UsageError(f"mesh has {unknown[0]}, and {path} has {rules.mesh}")
    fitted = rules.mesh.having(mesh or {})
    if world_size is not None and fitted.size != world_size:
        resized = fitted.resized(world_size)
        if resized is None:
            raise UsageError(
                f"{path} has a mesh of {fitted.size} ranks ({fitted}), and there are {world_size}: "
                "say the sizes of its axes, such as mesh={'tp': 2}"
            )
        fitted = resized
    return Declared(rules.on(fitted))
