"""Groups whose connections are aborted, and why groups cannot be renewed."""

import inspect
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ftrun.worker.survivors import backends, groups
from ftrun.worker.survivors.groups import ProcessGroups

TIMEOUT = timedelta(seconds=20)


@pytest.fixture
def noted() -> Iterator[ProcessGroups]:
    found = ProcessGroups()
    yield found
    found.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        return client, server.accept()[0]


def test_only_connections_are_found_and_cut() -> None:
    before = backends.tcp_connections()
    left, right = socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)):
        assert backends.tcp_connections() == before
    one, other = tcp_pair()
    found = backends.tcp_connections() - before
    assert {connection.fd for connection in found} == {one.fileno(), other.fileno()}
    backends.cut(found)
    assert one.recv(1) == b""
    for end in (left, right, one, other):
        end.close()


def test_a_descriptor_that_is_used_again_is_not_cut() -> None:
    before = backends.tcp_connections()
    one, other = tcp_pair()
    old = backends.tcp_connections() - before
    numbers = (one.fileno(), other.fileno())
    one.close()
    other.close()
    later, last = tcp_pair()
    assert {later.fileno(), last.fileno()} & set(numbers)
    backends.cut(old)
    last.send(b"x")
    assert later.recv(1) == b"x"
    later.close()
    last.close()


def real_pair(noted: ProcessGroups, backend_name: str = "gloo") -> list[dist.ProcessGroup]:
    """A group of two ranks, both in this process; `noted` knows the first."""
    store = dist.HashStore()
    made: list[Any] = [None, None]
    is_connected = threading.Event()

    def create(rank: int) -> dist.ProcessGroup:
        group = dist.ProcessGroup(store, rank, 2)
        kind = dist.ProcessGroup.BackendType.GLOO
        backend = dist.ProcessGroupGloo(store, rank, 2, timeout=TIMEOUT)
        group._register_backend(torch.device("cpu"), kind, backend)
        group._set_default_backend(kind)
        group._set_group_name("pair")  # type: ignore[arg-type]
        return group

    def first(_: Any) -> Any:
        made[0] = create(0)
        if "nccl" in backend_name:
            kind = dist.ProcessGroup.BackendType.NCCL
            made[0]._register_backend(torch.device("cuda"), kind, backends.fake(0, 2, fails=False))
        c10d._world.pg_map[made[0]] = (backend_name, store)
        assert is_connected.wait(TIMEOUT.total_seconds())  # an abort would end it while it connects
        return made[0], store

    def second() -> None:
        made[1] = create(1)
        is_connected.set()

    other = threading.Thread(target=second)
    other.start()
    noted.create = first
    c10d._new_process_group_helper(
        2,
        0,
        [0, 1],
        backend_name,
        store,
        "pair",
        timeout=TIMEOUT,  # type: ignore[arg-type]
    )
    other.join()
    return made


def test_a_group_that_is_created_after_an_abort_is_aborted(noted: ProcessGroups) -> None:
    noted.abort()
    first, second = real_pair(noted)
    try:
        with pytest.raises(RuntimeError, match=r"[Cc]onnection|peer"):
            first.allreduce([torch.ones(1)]).wait(TIMEOUT)
    finally:
        del c10d._world.pg_map[first], second


@pytest.mark.parametrize("backend_name", ["gloo", "cpu:gloo,cuda:nccl"])
def test_connections_of_another_thread_are_not_taken_for_those_of_a_group(
    noted: ProcessGroups, backend_name: str
) -> None:
    # Both ends of this group are in this process, so one connection is too many.
    first, second = real_pair(noted, backend_name)
    assert noted.problem == (
        "2 connections were opened during the creation of group pair, of which 1 are gloo's"
    )
    del c10d._world.pg_map[first], second


def test_no_connection_is_cut_for_a_group_without_gloo(noted: ProcessGroups) -> None:
    found: list[Any] = []

    def create(_: Any) -> Any:
        found.extend(tcp_pair())  # of another thread
        group = dist.ProcessGroup(dist.HashStore(), 0, 2)
        kind = dist.ProcessGroup.BackendType.NCCL
        group._register_backend(torch.device("cuda"), kind, backends.fake(0, 2, fails=False))
        c10d._world.pg_map[group] = ("nccl", dist.HashStore())
        found.append(group)
        return group, None

    noted.create = create
    c10d._new_process_group_helper(
        2,
        0,
        [0, 1],
        "nccl",
        dist.HashStore(),
        "pair",
        timeout=TIMEOUT,  # type: ignore[arg-type]
    )
    one, other, group = found
    assert noted.problem == ""
    noted.abort()
    one.send(b"x")
    assert other.recv(1) == b"x"
    del c10d._world.pg_map[group]
    one.close()
    other.close()


def test_groups_that_cannot_be_renewed(
    noted: ProcessGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert noted.problem == ""
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")
    assert noted.problem == "TORCH_GLOO_LAZY_INIT connects groups after their creation"
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "0")
    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        assert "TORCH_DISTRIBUTED_DEBUG=DETAIL" in noted.problem
    finally:
        dist.set_debug_level(level)
    import torch.testing._internal.distributed.fake_pg  # noqa: F401

    other = dist.new_group([0], backend="fake")
    assert noted.problem == "group 1 uses the backend fake"
    dist.destroy_process_group(other)
    assert noted.problem == ""
    world = dist.group.WORLD
    assert world is not None
    split = dist.ProcessGroup(dist.HashStore(), 0, 1)
    c10d._world.pg_map[split] = c10d._world.pg_map[world]
    c10d._world.pg_names[split] = "split"  # type: ignore[index, assignment]
    assert noted.problem.startswith("group split was created by split_group")
    del c10d._world.pg_map[split], c10d._world.pg_names[split]


def test_groups_of_other_ranks_are_in_the_digest(noted: ProcessGroups) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    before = noted.digest()
    dist.new_group([0])
    assert noted.digest() != before


def test_backends_are_exchanged_under_a_group(noted: ProcessGroups) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    world = dist.group.WORLD
    x = torch.ones(1)
    for generation in (2, 3):
        noted.detach()
        with pytest.raises(RuntimeError, match="error_on_collective"):
            dist.all_reduce(x)
        noted.stand_in()
        dist.all_reduce(x)
        assert noted.calls() == {"0": 0}
        noted.renew(dist.HashStore(), generation, TIMEOUT)
        dist.all_reduce(x)
        assert noted.calls() == {"0": 1}
        assert dist.group.WORLD is world
        assert (world.group_name, dist.get_backend()) == ("0", "gloo")  # type: ignore[union-attr]
        later = dist.new_group([0])
        dist.all_reduce(x, group=later)
        dist.destroy_process_group(later)
    assert noted.problem == ""
    noted._renewals = groups.MAX_RENEWALS
    assert noted.problem == "torch has types for 78 renewals of a group"


def test_the_timeout_of_the_script_outlasts_a_renewal(noted: ProcessGroups) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    c10d._set_pg_timeout(timedelta(seconds=77))
    noted.detach()
    noted.renew(dist.HashStore(), 2, TIMEOUT)
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    assert backend.options._timeout == timedelta(seconds=77)


def test_a_torch_without_a_name_is_a_reason(
    noted: ProcessGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("torch._C._distributed_c10d.FakeProcessGroup.Options")
    assert noted.problem == f"torch {torch.__version__} has no error_on_collective"
    assert groups.missing_names() == ["error_on_collective"]


def test_a_bug_here_costs_the_stay_and_not_the_script(
    noted: ProcessGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(backends, "tcp_connections", breaks)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(torch.zeros(1))
    assert noted.problem == "a bug in ftrun: ZeroDivisionError('a bug')"


def test_another_signature_of_torch_costs_the_stay_and_not_the_script(
    noted: ProcessGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(noted, "_signature", inspect.signature(lambda one: one))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(torch.zeros(1))
    assert noted.problem.startswith("a bug in ftrun: TypeError")
