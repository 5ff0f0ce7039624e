"""Process groups whose connections can be aborted and made again, while their objects stay.

Runs in:  worker; `abort` in any thread, everything else in the training thread.
Takes in: every group that torch creates after `ProcessGroups` is made; a store per renewal.
Gives:    groups with other backends. DDP, FSDP2, DTensor and DeviceMesh keep their groups, names
          and ranks. A collective costs the same before and after.

A ProcessGroup of torch keeps one Backend per BackendType. A backend of a type that is new to the
group becomes the backend of its devices; for a known type, the devices use the backend that the
group already has. BackendType is a byte, and torch uses 7 of its values.

Rule 1: a group that was created during or after `abort` is aborted at once. Otherwise a thread
        could wait in it for a rank that has ended.
Rule 2: only gloo's connections of a group are ended. If another thread, or NCCL in the same group,
        opens connections while a group is created, they cannot be distinguished, and the groups are
        not renewable.

Source: torch 2.13, c10d/ProcessGroup.hpp `setBackend`, distributed_c10d.py.
"""

import hashlib
import inspect
import json
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch._C._distributed_c10d as _c10d
import torch.distributed as dist
from torch._C._distributed_c10d import DebugLevel, PrefixStore, Store, get_debug_level
from torch.distributed import distributed_c10d as c10d

from ftrun.worker.survivors import backends
from ftrun.worker.survivors.backends import KINDS, Connection

_STAND_IN, _DETACHED, _FIRST_RENEWAL, _LAST = 90, 91, 100, 255
MAX_RENEWALS = (_LAST + 1 - _FIRST_RENEWAL) // len(KINDS)
_END_S = 5.0

_TYPES = {"gloo": dist.ProcessGroup.BackendType.GLOO, "nccl": dist.ProcessGroup.BackendType.NCCL}

Creation = Mapping[str, Any]
"""Arguments of torch's `_new_process_group_helper`, by name."""

Created = tuple[Any, Any]
"""What it returns: the group and its store; no group if this rank is not a member."""


@dataclass
class _Member:
    """A group that this rank is in."""

    group: "weakref.ref[dist.ProcessGroup]"
    name: str
    rank: int
    ranks: list[int]
    """As torch has it: empty for the default group."""
    kinds: dict[str, str]
    """Backend by type of device."""
    options: Any
    timeout: timedelta
    connections: frozenset[Connection] = frozenset()
    is_local: bool = False
    """It has never been connected; see `alone`."""
    fakes: dict[int, Any] = field(default_factory=dict)
    """By type. For a known type, torch compares the device of the old backend and of this one."""
    first_call: int = 0
    """Sequence number after creation."""
    problem: str = ""


class ProcessGroups:
    """All process groups of this process, in the order of their creation."""

    def __init__(self) -> None:
        self._members: list[_Member] = []
        self._calls: list[tuple[str, int, list[int], str]] = []
        """Also of groups without this rank, so that the list is the same on each rank."""
        self._renewals = 0
        self._is_aborted = False
        self._lock = threading.Lock()
        self._problem = ""
        self._devices = backends.GlooDevices()
        self._original: Callable[..., Created] = c10d._new_process_group_helper
        self._signature = inspect.signature(self._original)
        self.create: Callable[[Creation], Created] = lambda given: self._original(**given)
        """Creates a group. A process that sets up alone replaces it, see `alone`."""
        c10d._new_process_group_helper = self._create

    def _create(self, *args: Any, **kwargs: Any) -> Created:
        given: Creation | None = None
        known, before = set[int](), frozenset[Connection]()
        with self._noting_bugs():
            given = self._signature.bind(*args, **kwargs).arguments
            known = {id(one) for one in c10d._world.pg_map}
            before = backends.tcp_connections()
        if given is None:
            return self._original(*args, **kwargs)
        created = self.create(given)
        with self._noting_bugs():
            group = created[0]
            name, ranks = str(given["group_name"]), list(given["global_ranks_in_group"])
            self._calls.append((name, given["group_size"], ranks, str(given["backend"])))
            if isinstance(group, dist.ProcessGroup) and id(group) not in known:
                self._add(group, given, backends.tcp_connections() - before)
        return created

    @contextmanager
    def _noting_bugs(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - a bug in ftrun must not end the script
            self._problem = f"a bug in ftrun: {error!r}"

    def _add(
        self, group: dist.ProcessGroup, given: Creation, connections: frozenset[Connection]
    ) -> None:
        config = c10d.BackendConfig(c10d.Backend(str(given["backend"])))
        present = {device.type for device in group._device_types}
        kinds = {
            device: str(kind)
            for device, kind in config.get_device_backend_map().items()
            if device in present
        }
        member = _Member(
            weakref.ref(group),
            str(given["group_name"]),
            group.rank(),
            list(given["global_ranks_in_group"]),
            kinds,
            given.get("backend_options"),
            given["timeout"],
            _of_gloo(group, connections),
            is_local=any(one.name() == "fake" for one in _backends_of(group)),
        )
        member.first_call = _calls_of(group)
        self._check(member, group)
        with self._lock:
            self._members = [*self._alive(), member]
            is_aborted = self._is_aborted
        if is_aborted:
            self.abort()  # Rule 1

    def _check(self, member: _Member, group: dist.ProcessGroup) -> None:
        """Note why the group is not renewable, and the devices of gloo."""
        expected = 0
        for backend in _gloo_backends_of(group):
            self._devices.note(backend)
            expected += (group.size() - 1) * len(_devices_of(backend))
        others = set(member.kinds.values()) - set(KINDS)
        if others:
            member.problem = f"group {member.name} uses the backend {min(others)}"
        elif len(member.connections) != expected:  # Rule 2
            member.problem = (
                f"{len(member.connections)} connections were opened during the creation of group "
                f"{member.name}, of which {expected} are gloo's"
            )

    def _alive(self) -> list[_Member]:
        return [one for one in self._members if one.group() in c10d._world.pg_map]

    def _groups(self) -> Iterator[tuple[_Member, dist.ProcessGroup]]:
        for member in self._alive():
            if (group := member.group()) is not None:
                yield member, group

    @property
    def problem(self) -> str:
        """Why the groups cannot be renewed; empty if they can."""
        if self._problem or (found := _unsupported()):
            return self._problem or found
        if self._renewals >= MAX_RENEWALS:
            return f"torch has types for {MAX_RENEWALS} renewals of a group"
        known = {id(group) for _, group in self._groups()}
        for group, name in c10d._world.pg_names.items():
            if id(group) not in known:
                return f"group {name} was created by split_group, or by a backend of its own"
        return next((one.problem for one in self._alive() if one.problem), "")

    def digest(self) -> str:
        """Equal on all ranks that have created the same groups in the same order."""
        return hashlib.sha256(json.dumps(self._calls).encode()).hexdigest()

    def calls(self) -> dict[str, int]:
        """Collectives that were called since its creation, by name of the group."""
        return {one.name: _calls_of(group) - one.first_call for one, group in self._groups()}

    # --- exchange of backends ----------------------------------------------------------------

    def abort(self) -> None:
        """Make each collective in flight raise an error. Any thread may call this, also twice."""
        with self._lock:
            self._is_aborted = True
            members = list(self._members)
        nccl = [
            backend
            for member in members
            if (group := member.group()) is not None
            for backend in _backends_of(group)
            if backend.name() == "nccl"
        ]
        backends.abort_communicators(nccl)
        for member in members:
            backends.cut(member.connections)

    def detach(self) -> None:
        """Abort, and let each later collective fail; returns when no collective is in flight."""
        self.abort()
        connections = set[Connection]()
        for member, group in self._groups():
            member.timeout = _timeout_of(group, member.timeout)
            self._use_fake(member, group, _DETACHED)
            connections |= member.connections
            member.connections = frozenset()
        if not backends.await_end(connections, _END_S):
            self._problem = f"collectives did not end {_END_S:g} s after their abort"

    def stand_in(self) -> None:
        """Let each later collective succeed without any effect."""
        for member, group in self._groups():
            self._use_fake(member, group, _STAND_IN)

    def renew(self, store: Store, generation: int, timeout: timedelta) -> None:
        """Connect all groups again over this store. Every rank of the generation calls this.

        Args:
            timeout: for the connections of one group; the collectives keep their own timeout.
        """
        first = _FIRST_RENEWAL + self._renewals * len(KINDS)
        self._renewals += 1
        with self._lock:
            self._is_aborted = False
        for member, group in self._groups():
            inner = PrefixStore(f"{generation}/{member.name}/", store)
            before = backends.tcp_connections()
            made: dict[str, Any] = {}
            for device, kind in member.kinds.items():
                if kind not in made:
                    made[kind] = self._connect(member, group, kind, inner, timeout)
                is_free = member.is_local  # the group has no backend of torch's own type yet
                number = _TYPES[kind].value if is_free else first + KINDS.index(kind)
                _register(group, device, number, made[kind])
            if member.is_local:
                group._set_default_backend(_TYPES["nccl" if "nccl" in made else "gloo"])
                member.is_local = False
            self._rename(member, group)
            backend_name, _ = c10d._world.pg_map[group]
            c10d._world.pg_map[group] = (backend_name, inner)  # of groups that follow
            self._renewed(member, group, backends.tcp_connections() - before)

    def _renewed(
        self, member: _Member, group: dist.ProcessGroup, connections: frozenset[Connection]
    ) -> None:
        member.first_call = _calls_of(group)
        with self._lock:
            member.connections = _of_gloo(group, connections)
            is_aborted = self._is_aborted
        self._check(member, group)
        if is_aborted:
            self.abort()  # Rule 1

    def _connect(
        self,
        member: _Member,
        group: dist.ProcessGroup,
        kind: str,
        store: Store,
        timeout: timedelta,
    ) -> Any:
        inner = PrefixStore(f"{kind}/", store)
        size = group.size()
        if kind == "gloo":
            backend: Any = self._devices.create(
                inner, member.rank, size, min(timeout, member.timeout)
            )
            backend._set_default_timeout(member.timeout)
        else:
            options = backends.nccl_options(member.options, member.timeout)
            options.global_ranks_in_group, options.group_name = member.ranks, member.name
            backend = dist.ProcessGroupNCCL(inner, member.rank, size, options)
        backend.options.global_ranks_in_group = member.ranks
        backend.options.group_name = member.name
        backend._set_sequence_number_for_group()
        return backend

    def _use_fake(self, member: _Member, group: dist.ProcessGroup, number: int) -> None:
        if number not in member.fakes:
            fails = number == _DETACHED
            member.fakes[number] = backends.fake(member.rank, group.size(), fails=fails)
        for device in member.kinds:
            _register(group, device, number, member.fakes[number])
        self._rename(member, group)

    def _rename(self, member: _Member, group: dist.ProcessGroup) -> None:
        # The group reads its name from its backends.
        group._set_group_name(member.name)  # type: ignore[arg-type]
        group._set_group_desc(group.group_desc)

    def close(self) -> None:
        """Stop noting groups."""
        c10d._new_process_group_helper = self._original


def _register(group: dist.ProcessGroup, device: str, number: int, backend: Any) -> None:
    kind = dist.ProcessGroup.BackendType(number)
    group._register_backend(torch.device(device), kind, backend)


def _backends_of(group: dist.ProcessGroup) -> list[Any]:
    found: dict[int, Any] = {}
    for device in group._device_types:
        backend = group._get_backend(device)
        found[id(backend)] = backend
    return list(found.values())


def _devices_of(backend: Any) -> list[Any]:
    return list(backend.options._devices)


def _gloo_backends_of(group: dist.ProcessGroup) -> list[dist.ProcessGroupGloo]:
    return [one for one in _backends_of(group) if isinstance(one, dist.ProcessGroupGloo)]


def _of_gloo(group: dist.ProcessGroup, connections: frozenset[Connection]) -> frozenset[Connection]:
    """Those that may be gloo's. NCCL ends its own, which it mostly opens later."""
    return connections if _gloo_backends_of(group) else frozenset()


def _calls_of(group: dist.ProcessGroup) -> int:
    total = 0
    for backend in _backends_of(group):
        try:
            total += backend._get_sequence_number_for_group()
        except RuntimeError:  # a fake backend has none
            continue
    return total


def _timeout_of(group: dist.ProcessGroup, default: timedelta) -> timedelta:
    """The script may have changed it since the creation."""
    for backend in _backends_of(group):
        if backend.name() in KINDS:
            timeout: timedelta = backend.options._timeout
            return timeout
    return default


def _unsupported() -> str:
    """Why groups of this process cannot be renewed, whatever they are."""
    if missing := missing_names():
        return f"torch {torch.__version__} has no {missing[0]}"
    if get_debug_level() == DebugLevel.DETAIL:
        return "TORCH_DISTRIBUTED_DEBUG=DETAIL wraps each group"
    if os.environ.get("TORCH_GLOO_LAZY_INIT", "0") not in ("", "0"):
        return "TORCH_GLOO_LAZY_INIT connects groups after their creation"
    rpc = sys.modules.get("torch.distributed.rpc")
    if rpc is not None and getattr(rpc, "_is_current_rpc_agent_set", bool)():
        return "torch.distributed.rpc is used"
    return ""


def missing_names() -> list[str]:
    """Private names of torch that these groups need and this torch does not have."""
    fake = getattr(_c10d, "FakeProcessGroup", None)
    wanted: list[tuple[object, tuple[str, ...]]] = [
        (c10d, ("_new_process_group_helper", "BackendConfig", "_store_based_barrier")),
        (c10d._world, ("pg_map", "pg_names", "pg_backend_config")),
        (dist.ProcessGroup, ("_register_backend", "_get_backend", "_device_types")),
        (dist.ProcessGroup, ("_set_group_name", "_set_group_desc", "_set_default_backend")),
        (dist.ProcessGroupGloo, ("_Options", "_set_default_timeout")),
        (fake, ("_create_internal",)),
        (getattr(fake, "Options", None), ("error_on_collective",)),
    ]
    return [name for thing, names in wanted for name in names if not hasattr(thing, name)]
