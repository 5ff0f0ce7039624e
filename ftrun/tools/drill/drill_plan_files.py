"""Finds, reads and validates the files of drill plans.

Runs in:  cli.
Takes in: a YAML file, or the name of a packaged plan.
Gives:    a `DrillPlan`, or an error that lists all problems of the file.
"""

import difflib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import yaml

from ftrun.cli.launch.profiles import MAX_PROFILE_BYTES, PlainLoader, profile_folder, shown_path
from ftrun.config.checks import Problem, check
from ftrun.errors import ProfileInvalid, UsageError
from ftrun.tools.drill.expected import CLUSTER
from ftrun.tools.drill.plan import (
    DrillPlan,
    FaultSection,
    RunSection,
    plan_of,
    ranks_of,
    trials_of,
)
from ftrun.wire.fault_catalog import fault_kind

MAX_TRIALS = 2000
_PREFIX = "drill"
"""Prefix of the packaged plans, which are in the folder of the profiles."""


def drill_plan_names() -> list[str]:
    return sorted(path.stem for path in profile_folder().glob(f"{_PREFIX}*.yaml"))


def find_drill_plan(name: str) -> Path:
    names = drill_plan_names()
    for stem in (name, f"{_PREFIX}-{name}"):
        if stem in names:
            return profile_folder() / f"{stem}.yaml"
    if Path(name).is_file():
        return Path(name)
    near = difflib.get_close_matches(name, names, n=1)
    hint = f" Did you mean {near[0]}?" if near and os.sep not in name else ""
    raise UsageError(
        f"there is no drill plan {name!r}, neither of that name ({', '.join(names)}) nor as a file "
        f"under {Path.cwd()}.{hint}"
    )


def read_drill_plan(path: Path) -> DrillPlan:
    source = shown_path(path)
    data = path.read_bytes()
    if len(data) > MAX_PROFILE_BYTES:
        raise ProfileInvalid(
            source=source,
            problems=[f"it has {len(data)} bytes, and a plan has {MAX_PROFILE_BYTES} at most"],
        )
    try:
        found = yaml.load(data, Loader=PlainLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark is not None else ""
        raise ProfileInvalid(
            source=source, problems=[f"{where}{getattr(error, 'problem', None) or error}"]
        ) from None
    return plan_from(found, source)


def plan_from(found: object, source: str) -> DrillPlan:
    if not isinstance(found, dict):
        raise ProfileInvalid(
            source=source, problems=["a plan holds keys with values, such as faults"]
        )
    wrong: list[Problem] = []
    checked = check(found, DrillPlan, wrong)
    if wrong:
        raise ProfileInvalid(source=source, problems=[str(one) for one in wrong])
    plan = plan_of(cast("dict[str, Any]", checked))
    if problems := list(_problems(plan)):
        raise ProfileInvalid(source=source, problems=problems)
    return plan


def _problems(plan: DrillPlan) -> Iterator[str]:
    parts = plan.parts()
    if not parts:
        yield "it orders nothing: give it faults, or runs with faults"
    count = 0
    for number, part in enumerate(parts):
        where = part.name or f"runs[{number}]"
        for at, fault in enumerate(part.faults):
            yield from (f"{where}: faults[{at}]: {said}" for said in _of_fault(fault, part))
        if part.script is None and (part.notes or (part.args and part.job != "gpt")):
            yield f"{where}: args and notes go with a script of yours, or args with job gpt"
        count += sum(1 for _ in trials_of(part))
    if count > MAX_TRIALS:
        yield f"it orders {count} faults, and a plan orders {MAX_TRIALS} at most"


def _of_fault(fault: FaultSection, part: RunSection) -> Iterator[str]:
    if fault.kind.startswith(CLUSTER):
        return
    kind = fault_kind(fault.kind)
    if kind.by_rank and fault.node is not None:
        yield f"{kind.name} is done to a rank, not to a node"
    if not kind.by_rank and fault.rank is not None:
        yield f"{kind.name} is done to a node, not to a rank"
    world = part.nodes * part.ranks
    if wrong := [rank for rank in ranks_of(fault, world) if rank >= world]:
        yield f"there is no rank {wrong[0]} among {world}"
    if fault.node is not None and fault.node >= part.nodes + part.spares:
        yield f"there is no node {fault.node} among {part.nodes + part.spares}"
    if part.nodes > 1 and not kind.by_rank and fault.node is None and kind.name != "lead-kill":
        yield f"{kind.name}: which node?"
    if fault.amount is not None and not kind.unit:
        yield f"{kind.name} takes no amount"
