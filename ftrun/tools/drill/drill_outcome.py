"""Reads the results that a job recorded, and finds where two runs differ.

Runs in:  cli; also scripts/drill_nodes.py.
Takes in: files of JSON lines: `step` with the exact `loss`, and a final `digest`.
Gives:    outcomes that are compared byte for byte.
"""

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Outcome = dict[int | str, str]
"""Results of one rank: the loss of each step, and the final `digest`."""


def outcome_of(path: Path) -> Outcome:
    """Reads the outcome of one rank.

    If a repeated step has another result, both are joined to one text, which equals no other
    outcome.
    """
    found: Outcome = {}
    for line in notes_of(path):
        at: int | str
        if "loss" in line and "step" in line:
            at, value = int(line["step"]), str(line["loss"])
        elif "digest" in line:
            at, value = "digest", str(line["digest"])
        else:
            continue
        if found.setdefault(at, value) != value:
            found[at] += f" and {value}"
    return found


def notes_of(path: Path) -> list[dict[str, Any]]:
    """Returns the complete lines of a file that may still grow."""
    found = []
    if path.exists():
        for raw in path.read_bytes().split(b"\n")[:-1]:
            with contextlib.suppress(ValueError):
                line = json.loads(raw)
                if isinstance(line, dict):
                    found.append(line)
    return found


def difference(expected: Sequence[Outcome], found: Sequence[Outcome]) -> str:
    """Describes the first difference; empty if there is none."""
    at, said = first_difference(expected, found)
    return said if at is not None else ""


def first_difference(
    expected: Sequence[Outcome], found: Sequence[Outcome]
) -> tuple[int | str | None, str]:
    """Returns the step of the first difference (or `digest`) and its description.

    Returns (None, "") if there is no difference.
    """
    differences: list[tuple[int | str, str]] = []
    for rank, (right, is_so) in enumerate(zip(expected, found, strict=True)):
        for at in right:
            if is_so.get(at) != right[at]:
                what = "the state at the end" if at == "digest" else f"the loss of step {at}"
                said = f"{what} of rank {rank} is {is_so.get(at)}, undisturbed {right[at]}"
                differences.append((at, said))
                break
    if not differences:
        return None, ""
    return min(differences, key=lambda one: one[0] if isinstance(one[0], int) else 1 << 60)
