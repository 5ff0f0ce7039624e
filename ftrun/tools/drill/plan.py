"""Reads and checks a drill plan: the jobs, their nodes, the faults and the expected outcomes.

docs/operations.md documents the keys. Every part of a plan may override the plan's own settings.
"""

import difflib
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import msgspec
import yaml
from msgspec import Meta

from ftrun.cli.launch.profiles import (
    MAX_PROFILE_BYTES,
    PlainLoader,
    profile_folder,
    profile_problems,
    shown_path,
    yaml_problem,
)
from ftrun.config.checks import Problem, check, fields_of
from ftrun.errors import ProfileInvalid, UsageError
from ftrun.monitor.verdicts import VerdictKind
from ftrun.tools.drill.expected import CLUSTER, ExpectedOutcome, expected_of
from ftrun.wire.fault_catalog import FAULTS, fault_kind
from ftrun.wire.fault_orders import duration_s


def _as_duration(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return duration_s(value)
    except UsageError:
        raise ValueError(f"a time is such as 500ms, 5s, 2m or 1h, not {value!r}") from None


def _kind_problems(name: str) -> Iterator[str]:
    if not name.startswith(CLUSTER):
        try:
            fault_kind(name)
        except UsageError as error:
            yield str(error)


def _settings_problems(found: dict[str, Any]) -> Iterator[str]:
    nested: dict[str, dict[str, object]] = {}
    for name, value in found.items():
        section, _, key = name.partition(".")
        if key:
            nested.setdefault(section, {})[key] = value
        else:
            yield f"keys are such as hang.kill_after_s, not {name!r}"
    yield from map(str, profile_problems(nested))


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str | int) and not isinstance(value, bool) else value


Seconds = Annotated[float, Meta(ge=0, extra={"read": _as_duration})]
Index = Annotated[int, Meta(ge=0)]
Count = Annotated[int, Meta(ge=1)]
OneOrList = Meta(extra={"read": _as_list})


class _PlanSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A section of a plan; an unknown key is an error."""


class ExpectSection(_PlanSection, frozen=True, kw_only=True):
    """Overrides of the expected outcome; None: as in the catalogue."""

    verdict: Annotated[list[VerdictKind] | None, OneOrList] = None  # any of them; []: no incident
    culprits: list[int] | None = None  # ranks that must be named
    nodes: list[str] | None = None  # nodes that must be named
    action: Annotated[list[str] | None, OneOrList] = None  # the last one is one of these
    within_s: Seconds | None = None  # longest time from the fault to the verdict
    within_steps: Count | None = None  # most steps from the fault to the verdict
    steps_lost: Index | None = None  # at most
    equal: bool | None = None  # false: the result may differ
    exit_code: int | None = None  # of the run, if the fault ends it


class FaultSection(_PlanSection, frozen=True, kw_only=True):
    """One fault, for one or several ranks."""

    kind: Annotated[str, Meta(extra={"problems": _kind_problems})]  # or cluster:NAME
    rank: Annotated[
        Index | Annotated[list[Index], Meta(min_length=1)] | Literal["each"] | None,
        Meta(extra={"wanted": "a rank (0 or more), a list of ranks, or each"}),
    ] = None  # target; each: every rank, one after the other
    node: Index | None = None  # position of the target node
    step: Count | None = None  # inject at the end of this step; null: now
    lasts: Seconds | None = msgspec.field(default=None, name="for")
    amount: float | None = None
    repeat: Annotated[int, Meta(ge=1, le=100)] = 1  # times, one after the other
    alone: bool | None = None  # in a run of its own
    expect: ExpectSection = ExpectSection()


class RunSection(_PlanSection, frozen=True, kw_only=True):
    """A job on a number of nodes, and the faults to inject into it."""

    name: str | None = None  # for the table
    job: Literal["ddp", "fsdp2", "gpt"] = "ddp"  # a job of ftrun
    script: str | None = None  # a script of the user instead
    args: list[str] = msgspec.field(default_factory=list)  # of that script, or more of job gpt
    notes: str | None = None  # file of JSON lines with step and loss that the script writes
    nodes: Annotated[int, Meta(ge=1, le=64)] = 1  # more than 1: a virtual cluster
    ranks: Annotated[int, Meta(ge=1, le=64)] = 2  # on each node
    spares: Annotated[int, Meta(ge=0, le=16)] = 0
    pace: Seconds = 0.03  # time added to each step of ftrun's jobs
    step_s: Seconds = 0.0  # duration of a step; 0: as in ftrun's jobs
    steps_between: Count = 15  # steps from one fault to the next
    most_faults: Count = 30  # in one run
    flags: list[str] = msgspec.field(default_factory=list)  # more flags for ftrun
    settings: Annotated[dict[str, Any], Meta(extra={"problems": _settings_problems})] = (
        msgspec.field(default_factory=dict, name="set")
    )
    faults: list[FaultSection] = msgspec.field(default_factory=list)


class DrillPlan(RunSection, frozen=True, kw_only=True):
    """The complete file: common settings, and the parts."""

    about: str = ""  # a sentence for the page
    runs: list[RunSection] = msgspec.field(default_factory=list)  # one after the other
    minutes: Annotated[float, Meta(gt=0)] = 120.0  # time limit of the whole plan

    def parts(self) -> list[RunSection]:
        return [self, *self.runs] if self.faults else self.runs


def plan_of(found: dict[str, Any]) -> DrillPlan:
    """Makes a plan of checked values; each part takes over what the plan sets."""
    own = {name: found[name] for name in _COMMON if name in found}
    settings = found.get("set", {})
    runs = [
        {**own, **part, "set": {**settings, **part.get("set", {})}}
        for part in found.get("runs", [])
    ]
    return msgspec.convert({**found, "runs": runs}, DrillPlan)


_COMMON = fields_of(RunSection).keys() - {"faults", "name"}


@dataclass(frozen=True, slots=True)
class FaultTrial:
    """One fault to inject.

    Args:
        kind: a kind of the catalogue, or `cluster:` and a name of scripts/drill_faults.py.
        rank: -1 if the target is a node.
        node: the position of the node; -1 if the target is a rank or the only node.
        step: inject at the end of this step; 0: immediately.
        for_s: duration; None: the default of its kind.
        amount: strength; None: the default of its kind.
    """

    kind: str
    rank: int
    node: int
    step: int
    for_s: float | None
    amount: float | None
    expected: ExpectedOutcome

    @property
    def target(self) -> str:
        if self.kind.startswith(CLUSTER):
            return ""
        if self.rank >= 0:
            return f"rank {self.rank}"
        return f"node {self.node}" if self.node >= 0 else "the node"

    @property
    def lasts_s(self) -> float:
        if self.kind.startswith(CLUSTER):
            return 0.0
        return fault_kind(self.kind).for_s if self.for_s is None else self.for_s


def trials_of(part: RunSection) -> Iterator[FaultTrial]:
    """Yields every fault of a part in order, separately for each rank and repetition."""
    world = part.nodes * part.ranks
    for fault in part.faults:
        for rank in ranks_of(fault, world):
            trial = _trial(fault, rank, part)
            for _ in range(fault.repeat):
                yield trial


def ranks_of(fault: FaultSection, world: int) -> list[int]:
    if fault.kind.startswith(CLUSTER) or not FAULTS[fault.kind].by_rank:
        return [-1]
    if fault.rank == "each":
        return list(range(world))
    if isinstance(fault.rank, list):
        return fault.rank
    return [fault.rank if fault.rank is not None else world - 1]


def _trial(fault: FaultSection, rank: int, part: RunSection) -> FaultTrial:
    node = fault.node if fault.node is not None else -1
    expected = expected_of(
        fault.kind, rank=rank, node=f"node{node}" if part.nodes > 1 and node >= 0 else "",
        nodes=part.nodes,
    )  # fmt: skip
    given: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in msgspec.structs.asdict(fault.expect).items()
        if value is not None
    }
    if "verdict" in given:
        given["verdicts"] = tuple(kind.value for kind in given.pop("verdict"))
    if fault.alone is not None:
        given["alone"] = fault.alone
    if "evict" in given.get("action", ()) and fault.kind in ("slow", "slow-link"):
        given["incidents"] = 2  # reported first, and acted on when it persists
    expected = replace(expected, **given)
    return FaultTrial(fault.kind, rank, node, fault.step or 0, fault.lasts, fault.amount, expected)


# --- files ------------------------------------------------------------------------------------

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
    source, data = shown_path(path), path.read_bytes()
    if len(data) > MAX_PROFILE_BYTES:
        problem = f"it has {len(data)} bytes, and a plan has {MAX_PROFILE_BYTES} at most"
        raise ProfileInvalid(source=source, problems=[problem])
    try:
        found = yaml.load(data, Loader=PlainLoader)
    except yaml.YAMLError as error:
        raise ProfileInvalid(source=source, problems=[yaml_problem(error)]) from None
    return plan_from(found, source)


def plan_from(found: object, source: str) -> DrillPlan:
    if not isinstance(found, dict):
        problem = "a plan holds keys with values, such as faults"
        raise ProfileInvalid(source=source, problems=[problem])
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
            yield from (f"{where}: faults[{at}]: {printed}" for printed in _of_fault(fault, part))
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
    if part.nodes > 1 and not kind.by_rank and fault.node is None and kind.name != "leader-kill":
        yield f"{kind.name}: which node?"
    if fault.amount is not None and not kind.unit:
        yield f"{kind.name} takes no amount"
