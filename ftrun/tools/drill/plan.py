"""Defines a drill plan: the jobs, their nodes, the faults and the expected outcomes.

Runs in:  cli.
Takes in: the content of a YAML file (see `drill_plan_files.py`).
Gives:    a `DrillPlan`; `trials_of` yields the single faults of a part.

docs/operations.md documents the keys. Every part of a plan may override the plan's own settings.
"""

import difflib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
)

from ftrun.cli.launch.profiles import SettingValue, resolve
from ftrun.errors import ProfileInvalid, UsageError
from ftrun.monitor.verdicts import VerdictKind
from ftrun.tools.drill.expected import CLUSTER, ExpectedOutcome, expected_of
from ftrun.wire.fault_catalog import FAULTS, fault_kind
from ftrun.wire.fault_orders import duration_s

_VERDICTS = tuple(kind.value for kind in VerdictKind)


def _as_duration(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return duration_s(value)
    except UsageError:
        raise ValueError(f"a time is such as 500ms, 5s, 2m or 1h, not {value!r}") from None


def _check_ranks(value: object) -> object:
    """Reports one problem, because a union type would report one per member."""
    ranks = value if isinstance(value, list) else [value]
    are_ranks = all(type(one) is int and one >= 0 for one in ranks)
    if value is None or value == "each" or (ranks and are_ranks):
        return value
    raise ValueError(f"is a rank (0 or more), a list of some, or each, not {value!r}")


def _check_kind(name: str) -> str:
    if not name.startswith(CLUSTER):
        try:
            fault_kind(name)
        except UsageError as error:
            raise ValueError(str(error)) from None
    return name


def _check_verdicts(names: list[str]) -> list[str]:
    said = []
    for name in names:
        if name not in _VERDICTS:
            near = difflib.get_close_matches(name, _VERDICTS, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(_VERDICTS)}"
            said.append(f"there is no verdict {name!r}; {hint}")
    if said:
        raise ValueError("; ".join(said))
    return names


def _check_settings(found: dict[str, Any]) -> dict[str, Any]:
    """Checks that each is a profile key with a valid value."""
    said, settings = [], []
    for name, value in found.items():
        section, _, key = name.partition(".")
        if key:
            settings.append(SettingValue(section, key, value, name))
        else:
            said.append(f"keys are such as hang.kill_after_s, not {name!r}")
    try:
        resolve(None, variables={}, flags=settings)
    except ProfileInvalid as error:
        said += error.problems
    if said:
        raise ValueError("; ".join(said))
    return found


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str | int) and not isinstance(value, bool) else value


Seconds = Annotated[float, BeforeValidator(_as_duration), Field(ge=0)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, populate_by_name=True)


class ExpectSection(_Part):
    """Overrides of the expected outcome from the catalogue."""

    verdict: (
        Annotated[list[str], AfterValidator(_check_verdicts), BeforeValidator(_as_list)] | None
    ) = Field(default=None, description="kinds of verdict, any of them; []: no incident at all")
    culprits: list[int] | None = Field(default=None, description="ranks that must be named")
    nodes: list[str] | None = Field(default=None, description="nodes that must be named")
    action: Annotated[list[str], BeforeValidator(_as_list)] | None = Field(
        default=None, description="the last action taken is one of these"
    )
    within_s: Seconds | None = Field(default=None, description="from the fault to the verdict")
    within_steps: int | None = Field(
        default=None, ge=1, description="made from the fault to the verdict, at most"
    )
    steps_lost: int | None = Field(default=None, ge=0, description="at most")
    equal: bool | None = Field(default=None, description="false: the result need not be the same")
    exit_code: int | None = Field(default=None, description="of the run, where it ends it")


class FaultSection(_Part):
    """One fault, for one or several ranks."""

    kind: Annotated[str, AfterValidator(_check_kind)] = Field(
        description="of ftrun inject-fault --list, or cluster:NAME"
    )
    rank: Annotated[int | list[int] | Literal["each"] | None, BeforeValidator(_check_ranks)] = (
        Field(default=None, description="to whom; each: to every rank, one after the other")
    )
    node: int | None = Field(default=None, ge=0, description="to which node, by its place")
    step: int | None = Field(default=None, ge=1, description="at the end of this step; none: now")
    lasts: Seconds | None = Field(default=None, alias="for", description="how long")
    amount: float | None = Field(default=None, description="how much")
    repeat: int = Field(default=1, ge=1, le=100, description="so often, one after the other")
    alone: bool | None = Field(default=None, description="in a run of its own")
    expect: ExpectSection = ExpectSection()


class RunSection(_Part):
    """A job on a number of nodes, and the faults to inject into it."""

    name: str | None = Field(default=None, description="for the table")
    job: Literal["ddp", "fsdp2", "gpt"] = Field(default="ddp", description="a job of ftrun's own")
    script: str | None = Field(default=None, description="a script of yours instead")
    args: list[str] = Field(
        default_factory=list, description="what it is told; or job gpt, beside what it always is"
    )
    notes: str | None = Field(
        default=None, description="file of JSON lines with step and loss that your script writes"
    )
    nodes: int = Field(default=1, ge=1, le=64, description="more than 1: a virtual cluster")
    ranks: int = Field(default=2, ge=1, le=64, description="on each node")
    spares: int = Field(default=0, ge=0, le=16, description="nodes that stand by")
    pace: Seconds = Field(default=0.03, description="seconds added to each step of ftrun's jobs")
    step_s: Seconds = Field(default=0.0, description="what a step takes; 0: as ftrun's jobs do")
    steps_between: int = Field(default=15, ge=1, description="steps from one fault to the next")
    most_faults: int = Field(default=30, ge=1, description="in one run, at most")
    flags: list[str] = Field(default_factory=list, description="more flags for ftrun")
    settings: Annotated[dict[str, Any], AfterValidator(_check_settings)] = Field(
        default_factory=dict, alias="set", description="keys of the profile"
    )
    faults: list[FaultSection] = Field(default_factory=list, description="in this order")


class DrillPlan(RunSection):
    """The complete file: common settings, and the parts."""

    about: str = Field(default="", description="a sentence for the page")
    runs: list[RunSection] = Field(default_factory=list, description="parts, one after the other")
    minutes: float = Field(default=120.0, gt=0, description="all of it takes no longer")

    def parts(self) -> list[RunSection]:
        """Returns all parts, each completed with the settings of the plan."""
        own = {name: getattr(self, name) for name in self.model_fields_set if name in _COMMON}
        found = [self] if self.faults else []
        return [*found, *(_with_defaults(part, own) for part in self.runs)]


_COMMON = frozenset(RunSection.model_fields) - {"faults", "name"}


def _with_defaults(part: RunSection, own: dict[str, Any]) -> RunSection:
    missing = {name: value for name, value in own.items() if name not in part.model_fields_set}
    if "settings" in own:
        missing["settings"] = {**own["settings"], **part.settings}
    return part.model_copy(update=missing)


@dataclass(frozen=True, slots=True)
class FaultTrial:
    """One fault to inject.

    Args:
        name: the name in the table.
        kind: a kind of the catalogue, or `cluster:` and a name of scripts/drill_faults.py.
        rank: the target rank; -1 if the target is a node.
        node: the position of the target node; -1 if the target is a rank or the only node.
        step: inject at the end of this step; 0: immediately.
        for_s: duration; None for the default of its kind.
        amount: strength; None for the default of its kind.
        expected: the expected outcome.
    """

    name: str
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
    given = {
        key: getattr(fault.expect, key)
        for key in fault.expect.model_fields_set
        if getattr(fault.expect, key) is not None
    }
    for key in ("verdict", "culprits", "nodes", "action"):
        if key in given:
            given[key] = tuple(given[key])
    if "verdict" in given:
        given["verdicts"] = given.pop("verdict")
    if fault.alone is not None:
        given["alone"] = fault.alone
    if "evict" in given.get("action", ()) and fault.kind in ("slow", "slow-link"):
        given["incidents"] = 2  # reported first, and acted on when it persists
    expected = replace(expected, **given)
    return FaultTrial(
        fault.kind, fault.kind, rank, node, fault.step or 0, fault.lasts,
        fault.amount, expected,
    )  # fmt: skip
