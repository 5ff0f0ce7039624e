"""Puts a restored version into what is attached, in place.

Runs in:  worker, training thread, inside `attach`.
Takes in: this rank's arena, as it outlived the last worker, and the version to restore.
Gives:    modules, optimizers and all else as they were at that boundary, and ftrun's own values.

Modules are written into; optimizer state is handed over as copies, because an optimizer that
kept views of the arena would train in the snapshot. Random states come last and by themselves:
whatever runs between restore and first step may draw.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from ftrun import clock
from ftrun.errors import ShapeChanged
from ftrun.ids import Version
from ftrun.snapshot.layout import Entry
from ftrun.wire.crash_points import crash_point
from ftrun.wire.pages import Beat
from ftrun.worker import rng
from ftrun.worker.attached import SESSION_STATE, Attached, named_parts
from ftrun.worker.context import WorkerContext
from ftrun.worker.saved_shard import SavedShard, Sharded, check_fits, fits
from ftrun.worker.state_tree import Lasting, Source, StateTree
from ftrun.worker.tensors import DTYPES

_NOTHING = "nothing"


class Restorable(Protocol):
    """A version that can be put into what is attached, more than once."""

    def part(self, name: str) -> Any:
        """A part of the plain values."""
        ...

    def load(self, tree: StateTree, context: WorkerContext) -> None:
        """Load everything but the random states.

        Raises:
            SnapshotError: what is attached is not what was saved.
        """
        ...

    def put_back_random_states(self, attached: Attached) -> None: ...

    def close(self) -> None:
        """Let go of the memory it lies in."""
        ...


class Loadable(Protocol):
    """The state of one rank, as `reload` takes it."""

    version: Version

    def part(self, name: str) -> Any:
        """A part of the plain values, with its tensors."""
        ...

    def entry(self, name: str) -> Entry | None:
        """What was saved under a name; None: nothing."""
        ...

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor, which counts as used from now on: to copy from at once."""
        ...

    def copy_into(self, name: str, target: torch.Tensor) -> None:
        """Put a tensor into one of the same shape; it counts as used."""
        ...

    def check_all_used(self) -> None:
        """Nothing that was saved has been left behind.

        Raises:
            ShapeChanged: names the tensors that nobody wanted.
        """
        ...


class SavedState(SavedShard):
    """One version of this rank's shard, to be put into what is attached."""

    @property
    def layout(self) -> Any:
        """The layout that the script declared, as `ruled.Declared.saved`; None: it did not."""
        return self.part("layout") if "layout" in self._parts else None

    def load(self, tree: StateTree, context: WorkerContext) -> None:
        reload(self, tree, context)

    def put_back_random_states(self, attached: Attached) -> None:
        put_back_random_states(self, attached)

    def close(self) -> None:
        """Nothing: the arena is this rank's own, and goes on being used."""


def put_back_random_states(saved: Loadable, attached: Attached) -> None:
    """As they were at the boundary, or as they follow from that."""
    for name, state in saved.part("generators").items():
        if name in attached.generators:
            rng.set_generator(attached.generators[name], state)
    rng.put_back(saved.part("rng"))


def reload(saved: Loadable, tree: StateTree, context: WorkerContext) -> None:
    """Load everything but the random states.

    Raises:
        ShapeChanged: what is attached is not what was saved.
    """
    page = context.page
    page.set(Beat.RESTORE_BEGIN_NS, clock.now_ns())
    crash_point("worker.restore.begun")
    add_groups(saved.part("groups"), tree)
    lasting = tree.lasting()
    _load_tensors(saved, lasting, tree.attached)
    crash_point("worker.restore.tensors_loaded")
    _load_optimizers(saved, tree, lasting)
    load_objects(saved.part, tree.attached)
    saved.check_all_used()
    crash_point("worker.restore.loaded")
    page.set(Beat.RESTORED_GENERATION, saved.version.generation)
    page.set(Beat.RESTORED_STEP, saved.version.step)
    page.set(Beat.RESTORE_END_NS, clock.now_ns())


def add_groups(saved: dict[str, list[dict[str, Any]]], tree: StateTree) -> None:
    """Groups that the script had added later on, where the model still has their parameters."""
    present = {h.name: h.tensor for h in tree.lasting().held}
    for name, groups in saved.items():
        optimizer = tree.attached.optimizers.get(name)
        if optimizer is None:
            raise ShapeChanged(key=name, saved=f"{len(groups)} groups", present=_NOTHING)
        for at in range(len(optimizer.param_groups), len(groups)):
            names = groups[at]["params"]
            if missing := [one for one in names if present.get(one) is None]:
                raise ShapeChanged(
                    key=f"{name}.param_groups[{at}]", saved=missing[0], present=_NOTHING
                )
            optimizer.add_param_group({"params": [present[one] for one in names]})


def _load_tensors(saved: Loadable, lasting: Lasting, attached: Attached) -> None:
    names = {*lasting.names.values(), *attached.tensors}
    wanted = [source for source in lasting.sources if source.name in names]
    _check_entries(saved, wanted, casts=attached.casts)
    targets: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    large = []
    for source in wanted:
        if source.entry.is_small:
            targets.append(source.tensor)
            sources.append(saved.tensor(source.name))
        else:
            large.append(source)
    with torch.no_grad():
        if targets:
            torch._foreach_copy_(targets, sources)
        for source in large:
            saved.copy_into(source.name, source.tensor)
    freeze(saved.part("frozen"), lasting)


def _check_entries(saved: Loadable, wanted: Sequence[Source], *, casts: bool) -> None:
    """Raises: ShapeChanged: names those that were saved otherwise, or are on one side only."""
    changed = []
    for source in wanted:
        entry, now = saved.entry(source.name), source.entry
        if entry is None or entry.shape != now.shape or not fits(entry.dtype, now.dtype, casts):
            changed.append((source.name, str(entry) if entry else _NOTHING, str(now)))
    names = {source.name for source in wanted}
    left = [
        name
        for groups in saved.part("groups").values()
        for group in groups
        for name in group["params"]
        if name not in names
    ]
    check_fits([*changed, *((name, str(saved.entry(name)), _NOTHING) for name in left)])


def freeze(frozen: Iterable[str], lasting: Lasting) -> None:
    """Let just these parameters be the ones that are not learned."""
    frozen = set(frozen)
    for name, parameter in lasting.learned:
        if parameter.requires_grad == (name in frozen):
            parameter.requires_grad_(name not in frozen)


def _load_optimizers(saved: Loadable, tree: StateTree, lasting: Lasting) -> None:
    all_groups = saved.part("groups")
    all_states = saved.part("optimizer_state")
    for name, optimizer in tree.attached.optimizers.items():
        groups = groups_for(name, optimizer, all_groups)
        held = {key: e for key in lasting.names.values() if (e := saved.entry(key)) is not None}
        dtypes = {key: DTYPES[entry.dtype] for key, entry in held.items()}
        state = all_states[name]["state"]
        load_optimizer(name, optimizer, groups, state, names=lasting.names, dtypes=dtypes)


def groups_for(
    name: str, optimizer: torch.optim.Optimizer, saved: dict[str, list[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """The saved parameter groups of an optimizer.

    Raises:
        ShapeChanged: it was not there.
    """
    if name not in saved:
        raise ShapeChanged(key=name, saved=_NOTHING, present=type(optimizer).__name__)
    return saved[name]


def load_optimizer(
    name: str,
    optimizer: torch.optim.Optimizer,
    groups: list[dict[str, Any]],
    state: dict[Any, Any],
    *,
    names: dict[int, str],
    dtypes: Mapping[str, torch.dtype],
) -> None:
    """Hand over groups and state.

    Args:
        name: under which it is attached.
        optimizer: gets them.
        groups: with names in place of parameters.
        state: by name of the parameter, or by whatever other key.
        names: of parameters, by id.
        dtypes: that parameters had when they were saved, by name.

    Raises:
        ShapeChanged: its groups hold other parameters.
    """
    parameters = {names[id(p)]: p for group in optimizer.param_groups for p in group["params"]}
    index = {one: at for at, one in enumerate(parameters)}
    ordered = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    for at, (saved_group, present) in enumerate(zip(groups, ordered, strict=False)):
        # Their order says nothing: state goes by name, and other stages had them in another one.
        if sorted(saved_group["params"]) != sorted(present):
            raise ShapeChanged(
                key=f"{name}.param_groups[{at}]",
                saved=f"{len(saved_group['params'])} parameters ({_first(saved_group['params'])})",
                present=f"{len(present)} parameters ({_first(present)})",
            )
    if len(groups) != len(optimizer.param_groups):
        raise ShapeChanged(
            key=f"{name}.param_groups",
            saved=f"{len(groups)} groups",
            present=f"{len(optimizer.param_groups)} groups",
        )
    state = {key: _shard_like(parameters.get(key), values) for key, values in state.items()}
    optimizer.load_state_dict(
        {
            "state": {index.get(key, key): values for key, values in state.items()},
            "param_groups": [
                {**group, "params": [index[one] for one in present]}
                for group, present in zip(groups, ordered, strict=True)
            ],
        }
    )
    _restore_dtypes(optimizer, parameters, state, dtypes)


def _shard_like(parameter: torch.Tensor | None, values: Any) -> Any:
    if not isinstance(values, dict):
        return values
    return {
        key: value.like(parameter) if isinstance(value, Sharded) else value
        for key, value in values.items()
    }


def _restore_dtypes(
    optimizer: torch.optim.Optimizer,
    parameters: dict[str, torch.Tensor],
    state: dict[Any, Any],
    dtypes: Mapping[str, torch.dtype],
) -> None:
    # load_state_dict casts state to the parameter's dtype: bf16 parameters would lose the lower
    # half of an fp32 exp_avg. What had the parameter's dtype follows where that is another now.
    for key, values in state.items():
        if key not in parameters or not isinstance(values, dict):
            continue
        loaded = optimizer.state[parameters[key]]
        follows = dtypes.get(key, parameters[key].dtype)
        for field, value in values.items():
            is_tensor = isinstance(value, torch.Tensor)
            if is_tensor and loaded[field].dtype != value.dtype and value.dtype != follows:
                loaded[field] = value.to(loaded[field].device)


def load_objects(part: Callable[[str], Any], attached: Attached) -> None:
    """Give back their state to all that is neither module nor optimizer.

    Args:
        part: gives a part of the plain values by its name.
        attached: what gets them.
    """
    stateful = part("stateful")
    dicts = part("dicts")
    holders = {**attached.dicts, SESSION_STATE: attached.state}
    dicts.setdefault(SESSION_STATE, {})
    _check_names(stateful, attached.stateful)
    _check_names(dicts, holders)
    for name, thing in attached.stateful.items():
        thing.load_state_dict(_completed(stateful[name], thing.state_dict, name, attached))
    for name, holder in holders.items():
        saved = _completed(dicts[name], partial(dict, holder), name, attached)
        holder.clear()
        holder.update(saved)
    extra = part("extra_state")
    for name, module in attached.modules.items():
        for path, part in named_parts(module, name):
            if path in extra:
                part.set_extra_state(extra[path])


def _completed(saved: Any, present: Callable[[], Any], name: str, attached: Attached) -> Any:
    """What was saved of an object, and what it holds now of the keys that are skipped."""
    return attached.skip.completed(saved, present(), name) if attached.skip else saved


def _check_names(saved: Iterable[str], present: Iterable[str]) -> None:
    saved, present = set(saved), set(present)
    for name in sorted(saved - present):
        raise ShapeChanged(key=name, saved="something", present=_NOTHING)
    for name in sorted(present - saved):
        raise ShapeChanged(key=name, saved=_NOTHING, present="something")


def _first(names: list[str]) -> str:
    return f"{names[0]} ..." if names else "none"
