"""Loads a restored version into the attached objects, in place.

Runs in:  worker, training thread, inside `attach`.

Modules are written in place. Optimizer state is passed as copies, because an optimizer that kept
views of the arena would change the snapshot. Random states are restored last and separately,
because code that runs between restore and first step may draw random numbers.
"""

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from ftrun import clock
from ftrun.errors import ShapeChanged, SnapshotCorrupt, SnapshotError
from ftrun.ids import Version
from ftrun.snapshot.boxes import Shape
from ftrun.snapshot.layout import LayoutEntry
from ftrun.wire.crash_points import crash_point
from ftrun.wire.shared_memory.arena import Arena
from ftrun.wire.shared_memory.pages import HeartbeatField, SharedPage
from ftrun.worker.capture.device_copies import synchronize
from ftrun.worker.context import WorkerContext
from ftrun.worker.restore.shard import LocalShardReader, check_fits, fits
from ftrun.worker.smp_client import WorkerSmpClient
from ftrun.worker.state import determinism as rng
from ftrun.worker.state import module_state
from ftrun.worker.state.attached import SESSION_STATE, AttachedState, Skip, loadable
from ftrun.worker.state.optimizer_state import load_optimizer, load_wrapper, put_back_gradients
from ftrun.worker.state.providers import load_providers
from ftrun.worker.state.state_tree import PersistentSources, StateTree, TensorSource
from ftrun.worker.state.structure import add_groups, make_fit
from ftrun.worker.state.tensors import DTYPES, byte_view, copyable, is_expanded

_NOTHING = "nothing"
Named = Mapping[str, Any]


class SavedState(Protocol):
    """The state of one rank, as `reload` loads it; more than once."""

    version: Version

    def part(self, name: str) -> Any:
        """A part of the plain values."""
        ...

    def optional_part(self, name: str) -> Any:
        """Like `part`; None if an older version of ftrun did not save it."""
        ...

    def described(self, name: str) -> tuple[str, Shape] | None: ...

    def groups_among(self, present: Collection[str]) -> dict[str, list[dict[str, Any]]]: ...

    def load_tensors(self, tree: StateTree, persistent: PersistentSources, groups: Named) -> None:
        """Fill all tensors that exist; `groups` names the saved optimizers."""
        ...

    def optimizer_states(self) -> Named:
        """State by optimizer and parameter, with tensors; called after `load_tensors`."""
        ...

    def check_all_used(self) -> None:
        """Raise ShapeChanged with the names of saved tensors that were not used."""
        ...

    def close(self) -> None: ...


class RankState(SavedState, Protocol):
    """The state of one rank by entries, as if the rank had taken the version itself."""

    def entry(self, name: str) -> LayoutEntry | None: ...

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor to copy from at once; it counts as used."""
        ...

    def copy_into(self, name: str, target: torch.Tensor) -> None:
        """Copy a tensor into one of the same shape; it counts as used."""
        ...

    def described(self, name: str) -> tuple[str, Shape] | None:
        entry = self.entry(name)
        return None if entry is None else (entry.dtype, entry.shape)

    def groups_among(self, present: Collection[str]) -> dict[str, list[dict[str, Any]]]:
        groups: dict[str, list[dict[str, Any]]] = self.part("groups")
        return groups

    def load_tensors(self, tree: StateTree, persistent: PersistentSources, groups: Named) -> None:
        names = {*persistent.names.values(), *tree.attached.tensors}
        wanted = [source for source in persistent.sources if source.name in names]
        _check_entries(self, wanted, casts=tree.attached.casts)
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        large, expanded = [], []
        for source in wanted:
            if is_expanded(source.tensor):
                expanded.append(source)
            elif source.entry.is_small:
                targets.append(copyable(source.tensor))
                sources.append(copyable(self.tensor(source.name)))
            else:
                large.append(source)
        pairs = zip(persistent.sources, persistent.originals, strict=True)
        originals = {source.name: original for source, original in pairs}
        with torch.no_grad():
            if targets:
                torch._foreach_copy_(targets, sources)
            for source in large:
                self.copy_into(source.name, source.tensor)
            for source in expanded:
                fill_expanded(originals[source.name], self.tensor(source.name))

    def optimizer_states(self) -> Named:
        saved = self.part("optimizer_state")
        return {name: optimizer["state"] for name, optimizer in saved.items()}


class LocalState(LocalShardReader, RankState):
    """One version of this rank's shard, for loading into the attached objects."""

    @property
    def layout(self) -> Any:
        """The declared layout, as `carried` packs it; None if the script declared none."""
        return self.optional_part("layout")

    def close(self) -> None:
        """Nothing to release: the arena is this rank's own and stays in use."""


def arena_with(wanted: Version, context: WorkerContext, link: WorkerSmpClient) -> Arena:
    """Return the inherited arena, or the SMP's arena if this rank is new on its node."""
    if context.arena_fd is not None:
        arena = Arena(context.arena_fd, writable=True)
        if arena.find(wanted) is not None:
            return arena
        arena.close()
    if context.launch.rehearses:
        raise SnapshotError(f"{wanted} is not in the memory of rank {context.rank} any more")
    return Arena(link.await_restored(wanted), writable=True)


def saved_part(context: WorkerContext, name: str) -> Any:
    """A part of the plain values of the version to restore, before `attach`."""
    assert context.restore is not None
    link = WorkerSmpClient(context)
    try:
        arena = arena_with(context.restore, context, link)
        return LocalState(arena, context.restore, context).part(name)
    finally:
        link.close()


@contextlib.contextmanager
def reporting_corruption(context: WorkerContext) -> Iterator[None]:
    """Write a corrupt shard to the heartbeat page, so that the agent rejects the version."""
    try:
        yield
    except SnapshotCorrupt as error:
        context.page.note = str(error)
        if error.rank is not None:
            context.page.set(HeartbeatField.CORRUPT_RANK, 1 + error.rank)
            context.page.set(HeartbeatField.CORRUPT_SLOT, 1)
        raise


def put_back_random_states(saved: SavedState, attached: AttachedState) -> None:
    for name, state in saved.part("generators").items():
        if name in attached.generators:
            rng.set_generator(attached.generators[name], state)
    rng.put_back(saved.part("rng"))


def reload(
    saved: SavedState, tree: StateTree, context: WorkerContext, *, keeps_memory: bool = False
) -> None:
    """Load everything except the random states.

    `keeps_memory`: tensors of optimizers are filled in place too, if this rank saved the version.
    """
    if keeps_memory and isinstance(saved, LocalState):
        persistent = tree.persistent()
        pairs = zip(persistent.sources, persistent.originals, strict=True)
        saved.reuse_memory({source.name: (source.tensor, one) for source, one in pairs})
    with reporting_corruption(context):
        _reload(saved, tree, context.page)


def _reload(saved: SavedState, tree: StateTree, page: SharedPage) -> None:
    page.set(HeartbeatField.RESTORE_BEGIN_NS, clock.now_ns())
    crash_point("worker.restore.started")
    make_fit(saved.optional_part("modules") or {}, saved.described, tree)
    groups = saved.groups_among(set(tree.persistent().names.values()))
    add_groups(groups, tree)
    persistent = tree.persistent()
    # The script may have filled a tensor, and may read it, in any stream of its device.
    synchronize(persistent.originals)
    saved.load_tensors(tree, persistent, groups)
    crash_point("worker.restore.tensors_loaded")
    _load_optimizers(saved, tree, persistent, groups)
    _load_objects(saved, tree.attached, persistent)
    content = saved.optional_part("providers") or {}
    _check_names(content, tree.providers, tree.attached.skip)
    load_providers(content, tree.providers, tree.sizes)
    saved.check_all_used()
    synchronize(persistent.originals)
    crash_point("worker.restore.loaded")
    page.set(HeartbeatField.RESTORED_GENERATION, saved.version.generation)
    page.set(HeartbeatField.RESTORED_STEP, saved.version.step)
    page.set(HeartbeatField.RESTORE_END_NS, clock.now_ns())


def fill_expanded(target: torch.Tensor, saved: torch.Tensor) -> None:
    """Fill a tensor in which several items share memory, such as an expanded buffer.

    If those items were saved with different values, the tensor gets memory for each item.
    """
    one_each, its = copyable(target.detach()), copyable(saved)
    for dim, stride in enumerate(target.stride()):
        if stride == 0:
            one_each, its = one_each.narrow(dim, 0, 1), its.narrow(dim, 0, 1)
    one_each.copy_(its)
    now = byte_view(copyable(target).contiguous())
    if not torch.equal(now, byte_view(saved.to(target.device))):
        target.data = saved.to(target.device, target.dtype, copy=True)


def _check_entries(saved: RankState, wanted: Sequence[TensorSource], *, casts: bool) -> None:
    """Raise ShapeChanged with the entries that differ, or exist on one side only."""
    changed = []
    for source in wanted:
        entry, now = saved.entry(source.name), source.entry
        if entry is None or entry.shape != now.shape or not fits(entry.dtype, now.dtype, casts):
            changed.append((source.name, str(entry) if entry else _NOTHING, str(now)))
    names = {source.name for source in wanted}
    groups = (group for some in saved.part("groups").values() for group in some)
    left = [name for group in groups for name in group["params"] if name not in names]
    check_fits([*changed, *((name, str(saved.entry(name)), _NOTHING) for name in left)])


def _put_back_flags(part: Callable[[str], Any], persistent: PersistentSources) -> None:
    """Restore `requires_grad`, the presence of gradients, and the training flags of modules."""
    frozen = set(part("frozen"))
    for name, parameter in persistent.learned:
        if parameter.requires_grad == (name in frozen):
            parameter.requires_grad_(name not in frozen)
    if (learned := part("learned_others")) is not None:
        for name, tensor in persistent.others:
            if tensor.requires_grad != (name in learned):
                tensor.requires_grad_(name in learned)
    if (training := part("training")) is not None:
        module_state.put_back_training_flags(training, persistent.submodules)
    if (gradients := part("gradients")) is not None:
        put_back_gradients(gradients, persistent.parameters, persistent.names)


def _load_optimizers(
    saved: SavedState, tree: StateTree, persistent: PersistentSources, groups: Named
) -> None:
    attached = tree.attached
    states = saved.optimizer_states()
    keys = saved.optional_part("optimizer_keys") or {}
    described = {name: saved.described(name) for name in persistent.names.values()}
    dtypes = {name: DTYPES[found[0]] for name, found in described.items() if found is not None}
    for name in attached.optimizers:
        load_optimizer(name, attached, groups, states, keys, names=persistent.names, dtypes=dtypes)
    for name, wrapper in attached.wrappers.items():
        if name in keys:
            load_wrapper(wrapper, keys[name], attached.optimizers.values())


def _load_objects(
    saved: SavedState, attached: AttachedState, persistent: PersistentSources
) -> None:
    """Load the state of all objects that are neither tensor nor optimizer, and all flags."""
    stateful = saved.part("stateful")
    dicts = saved.part("dicts")
    holders = {**attached.dicts, SESSION_STATE: attached.state}
    dicts.setdefault(SESSION_STATE, {})
    skip = attached.skip
    _check_names(stateful, attached.stateful, skip)
    _check_names(dicts, holders, skip)
    for name, thing in attached.stateful.items():
        if not skip(name):
            its = _completed(stateful[name], thing.state_dict, name, attached)
            thing.load_state_dict(loadable(thing, its))
    for name, holder in holders.items():
        if skip(name):
            continue
        its = _completed(dicts[name], partial(dict, holder), name, attached)
        holder.clear()
        holder.update(its)
    extra = saved.part("extra_state")
    for path, part in dict(persistent.submodules).items():
        if path in extra:
            at = f"{path}{module_state.EXTRA_STATE}"
            part.set_extra_state(_completed(extra[path], part.get_extra_state, at, attached))
    module_state.put_back_own_keys(
        saved.optional_part("own_keys") or {}, persistent.submodules, skip.completed
    )
    _put_back_flags(saved.optional_part, persistent)


def _completed(saved: Any, present: Callable[[], Any], name: str, attached: AttachedState) -> Any:
    return attached.skip.completed(saved, present(), name) if attached.skip else saved


def _check_names(saved: Iterable[str], present: Iterable[str], skip: Skip) -> None:
    saved, present = ({name for name in names if not skip(name)} for names in (saved, present))
    for name in sorted(saved - present):
        raise ShapeChanged(key=name, saved="something", present=_NOTHING)
    for name in sorted(present - saved):
        raise ShapeChanged(key=name, saved=_NOTHING, present="something")
