"""What a job has noted of its own result, and where two runs of it differ.

Runs in:  cli; scripts/drill_nodes.py too.
Takes in: files of JSON lines: `step` with `loss`, exactly written, and at the end a `digest`.
Gives:    outcomes that can be compared byte for byte.
"""

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Outcome = dict[int | str, str]
"""Of a rank: the loss by step, and the `digest` at the end."""


def outcome_of(path: Path) -> Outcome:
    """A step that was done twice with two results has both of them, and so equals nothing."""
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
    """The whole lines of a file that may still be written."""
    found = []
    if path.exists():
        for raw in path.read_bytes().split(b"\n")[:-1]:
            with contextlib.suppress(ValueError):
                line = json.loads(raw)
                if isinstance(line, dict):
                    found.append(line)
    return found


def difference(expected: Sequence[Outcome], found: Sequence[Outcome]) -> str:
    """The first one in words; empty where there is none."""
    at, said = first_difference(expected, found)
    return said if at is not None else ""


def first_difference(
    expected: Sequence[Outcome], found: Sequence[Outcome]
) -> tuple[int | str | None, str]:
    """At which step, or at the `digest`, and in words; (None, "") where there is none."""
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
