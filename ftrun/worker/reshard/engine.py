"""Loads a version that ranks of another layout took into the attached objects, in place.

Runs in:  worker, training thread, inside `attach`; no collective.
Takes in: a `SourceState`, the attached objects.
Gives:    this rank's part of the parameters, buffers and optimizer state of the previous world; all
          other state as in `reload`.

Optimizer state is created before it is filled, because most optimizers have none before their first
step. State of its parameter's shape is created like the parameter, other state as a plain tensor.
If several old ranks hold equal bytes, they are read from one of them; the others are compared with
it by digest.
"""

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch

from ftrun import clock
from ftrun.errors import ShapeChanged, SnapshotCorrupt
from ftrun.ids import Rank, Version
from ftrun.sharding.mesh import ranks_alone
from ftrun.sharding.source_index import WholeTensor
from ftrun.snapshot.boxes import Shape
from ftrun.snapshot.plain_values import TensorRef
from ftrun.wire.crash_points import crash_point
from ftrun.wire.shared_memory.pages import HeartbeatField
from ftrun.worker.context import WorkerContext
from ftrun.worker.replicas import check_replicas
from ftrun.worker.reshard.remote_images import JoinedShards, RemoteShards
from ftrun.worker.reshard.source import LocalShards, ShardSource
from ftrun.worker.reshard.source_state import NewRank, SourceState
from ftrun.worker.reshard.tensor_reader import fill
from ftrun.worker.restore import ready_memory
from ftrun.worker.restore.loader import fill_expanded, load_objects
from ftrun.worker.restore.shard import check_fits, fits
from ftrun.worker.smp_client import WorkerSmpClient
from ftrun.worker.state.attached import AttachedState
from ftrun.worker.state.declared_layout import DeclaredSharding
from ftrun.worker.state.optimizer_state import groups_for, load_optimizer
from ftrun.worker.state.parts import box_of
from ftrun.worker.state.state_tree import PersistentSources, StateTree
from ftrun.worker.state.structure import add_groups, make_fit
from ftrun.worker.state.tensors import (
    DTYPE_NAMES,
    DTYPES,
    is_expanded,
    is_sharded,
    local_tensor,
    stride_of,
)  # fmt: skip

_NOTHING = "nothing"

_log = logging.getLogger(__name__)


class ReshardedState:
    """A version of another number of ranks, as `SnapshotSession` restores it."""

    def __init__(self, saved: SourceState) -> None:
        self._saved = saved

    def part(self, name: str) -> Any:
        return self._saved.part(name)

    def load(self, tree: StateTree, context: WorkerContext) -> None:
        reload_resized(self._saved, tree, context)

    def put_back_random_states(self, attached: AttachedState) -> None:
        self._saved.put_back_random_states(attached)

    def close(self) -> None:
        self._saved.close()


def open_resized(
    context: WorkerContext, link: WorkerSmpClient, layout: DeclaredSharding | None = None
) -> ReshardedState:
    """Open the version to restore from the shards of ranks of another layout.

    Args:
        context: of the rank that restores it.
        link: to the SMP.
        layout: the mesh of all ranks; None: the script does not declare it.

    Raises:
        SnapshotError, PeerError: a shard is missing, or differs from the sealed one.
    """
    assert context.restore is not None
    old_size = context.restore_world_size
    mesh = ranks_alone(context.world_size) if layout is None else layout.rules.mesh
    images = images_of(context.restore, link, old_size)
    with telling_of_corruption(context):
        saved = SourceState(images, context.restore, old_size, NewRank(context.rank, mesh))
    if context.rank == 0:
        for note in saved.notes():
            _log.warning("%s", note)
    return ReshardedState(saved)


def images_of(wanted: Version, link: WorkerSmpClient, old_size: int) -> ShardSource:
    """All shards: those of this node in place, those of other nodes fetched when they are read."""
    fds = link.open_images(wanted, old_size)
    here = LocalShards(fds, wanted)
    elsewhere = [Rank(rank) for rank in range(old_size) if rank not in fds]
    return JoinedShards(here, RemoteShards(link, wanted, elsewhere)) if elsewhere else here


def reload_resized(saved: SourceState, tree: StateTree, context: WorkerContext) -> None:
    """Load everything except the random states.

    Raises:
        ShapeChanged: the attached objects do not match the saved ones.
        SnapshotCorrupt, TensorIncomplete, RanksDiffer: the saved state is damaged or incomplete.
    """
    page = context.page
    page.set(HeartbeatField.RESTORE_BEGIN_NS, clock.now_ns())
    crash_point("worker.restore.begun")

    def described(name: str) -> tuple[str, Shape] | None:
        found = saved.index.tensor(name)
        return None if found is None else (found.dtype, found.shape)

    make_fit(saved.optional_part("modules") or {}, described, tree)
    groups = saved.groups_among(set(tree.lasting().names.values()))
    add_groups(groups, tree)
    lasting = tree.lasting()
    wanted = _Wanted(saved, casts=tree.attached.casts)
    wanted.add_attached(lasting, tree)
    states = {
        name: _states(name, optimizer, wanted, lasting)
        for name, optimizer in tree.attached.optimizers.items()
        if name in groups
    }
    with torch.no_grad(), telling_of_corruption(context):
        check_replicas(wanted.saved, wanted.tensors, saved.images)
        fill(wanted.tensors, wanted.saved, saved.images)
        for name, target in wanted.expanded.items():
            fill_expanded(target, wanted.tensors[name])
    crash_point("worker.restore.tensors_loaded")
    for name, optimizer in tree.attached.optimizers.items():
        own = groups_for(name, optimizer, groups)
        load_optimizer(
            name,
            optimizer,
            own,
            states[name],
            names=lasting.names,
            dtypes=wanted.dtypes,
            skip=tree.attached.skip,
        )
    load_objects(saved, tree.attached, lasting)
    saved.check_all_used()
    crash_point("worker.restore.loaded")
    page.set(HeartbeatField.RESTORED_GENERATION, saved.version.generation)
    page.set(HeartbeatField.RESTORED_STEP, saved.version.step)
    page.set(HeartbeatField.RESTORE_END_NS, clock.now_ns())


@contextlib.contextmanager
def telling_of_corruption(context: WorkerContext) -> Iterator[None]:
    """Report a corrupt shard on the heartbeat page, so that the agent rejects it."""
    try:
        yield
    except SnapshotCorrupt as error:
        context.page.note = str(error)
        if error.rank is not None:
            context.page.set(HeartbeatField.CORRUPT_RANK, 1 + error.rank)
            context.page.set(HeartbeatField.CORRUPT_SLOT, 1)
        raise


class _Wanted:
    """The tensors to fill and their saved tensors, both by name."""

    def __init__(self, saved: SourceState, *, casts: bool) -> None:
        self.world = saved
        self.casts = casts
        self.tensors: dict[str, torch.Tensor] = {}
        self.expanded: dict[str, torch.Tensor] = {}
        """Tensors that receive their values from the tensors of the same name in `tensors`."""
        self.saved: dict[str, WholeTensor] = {}

    def add_attached(self, lasting: PersistentSources, tree: StateTree) -> None:
        names = {*lasting.names.values(), *tree.attached.tensors}
        pairs = zip(lasting.sources, lasting.originals, strict=True)
        wanted = [(source.name, original) for source, original in pairs if source.name in names]
        changed = [found for one in wanted if (found := self._changed(*one)) is not None]
        # If ranks are pipeline stages, other ranks have the tensors that are not on this one.
        common = [] if self.world.has_stages else self.world.index.common_names
        left = [name for name in common if name in self.world.parameters - names]
        check_fits([*changed, *((n, str(self.world.whole(n)), _NOTHING) for n in left)])
        for name, tensor in wanted:
            self.add(name, tensor)

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        return {name: DTYPES[saved.dtype] for name, saved in self.saved.items()}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Add a tensor to fill.

        Raises:
            ShapeChanged: the tensor saved under this name does not fit it.
        """
        if (changed := self._changed(name, tensor)) is not None:
            check_fits([changed])
        found = self.world.whole(name)
        assert found is not None, name
        self.tensors[name] = tensor.detach()
        if is_expanded(local_tensor(tensor, name)):
            self.expanded[name], self.tensors[name] = tensor, tensor.detach().clone()
        self.saved[name] = found

    def _changed(self, name: str, tensor: torch.Tensor) -> tuple[str, str, str] | None:
        found = self.world.whole(name)
        now = (DTYPE_NAMES[tensor.dtype], tuple(tensor.shape))
        if found is None or found.shape != now[1] or not fits(found.dtype, now[0], self.casts):
            saved = _NOTHING if found is None else str(found)
            return name, saved, f"{now[0]}{list(now[1])}"
        if box_of(tensor) is None:
            return name, str(found), "a DTensor with strided shards or partial sums"
        return None


def _states(
    optimizer_name: str,
    optimizer: torch.optim.Optimizer,
    wanted: _Wanted,
    lasting: PersistentSources,
) -> dict[Any, Any]:
    parameters = {lasting.names[id(p)]: p for g in optimizer.param_groups for p in g["params"]}
    elsewhere = wanted.world.parameters - parameters.keys()
    found: dict[Any, Any] = {}
    for rank in wanted.world.ranks:
        saved = wanted.world.optimizer_state(rank)[optimizer_name]["state"]
        for key, values in saved.items():
            if key not in found and key not in elsewhere:
                found[key] = _made(values, parameters.get(key), wanted, rank)
        # An old rank without state of a parameter never stepped it, or another rank stepped it.
        if all(name in found for name in parameters):
            break
    return found


def _made(values: Any, parameter: torch.Tensor | None, wanted: _Wanted, rank: Rank) -> Any:
    if isinstance(values, TensorRef):
        return _made_tensor(values, parameter, wanted, rank)
    if isinstance(values, dict):
        return {key: _made(value, parameter, wanted, rank) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return type(values)(_made(value, parameter, wanted, rank) for value in values)
    return values


def _made_tensor(
    ref: TensorRef, parameter: torch.Tensor | None, wanted: _Wanted, rank: Rank
) -> object:
    if ref.kind == "array":
        wanted.world.whole(ref.name)
        return wanted.world.copy(rank, ref)
    saved = wanted.world.whole(ref.name)
    assert saved is not None, ref.name
    dtype = DTYPES[saved.dtype]
    is_like = parameter is not None and saved.shape == tuple(parameter.shape) and saved.shape
    if parameter is not None and is_sharded(parameter) and is_like:
        made = _like(parameter, dtype)
    elif ref.kind == "sharded" and parameter is not None and not is_like:
        raise ShapeChanged(
            key=ref.name, saved=f"a sharded {saved}", present=f"state of {list(parameter.shape)}"
        )
    else:
        # Numbers, such as the step, are created on the CPU, as in torch's optimizers.
        device = parameter.device if parameter is not None and saved.shape else "cpu"
        made = ready_memory.empty(saved.shape, dtype, device, ref.stride)
    wanted.add(ref.name, made)
    return made


def _like(parameter: Any, dtype: torch.dtype) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    local = local_tensor(parameter, "a parameter")
    return DTensor.from_local(
        ready_memory.empty(tuple(local.shape), dtype, local.device, stride_of(local)),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
