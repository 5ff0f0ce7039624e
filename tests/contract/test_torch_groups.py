"""What `ftrun.worker.survivors` expects of torch: private names, and how they behave."""

import inspect
import os
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from ftrun.worker.survivors import backends, groups

TIMEOUT = timedelta(seconds=20)
BackendType = dist.ProcessGroup.BackendType


@pytest.fixture(autouse=True)
def world() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_no_name_of_groups_is_missing() -> None:
    assert groups.missing_names() == []


def test_the_creator_of_groups_has_the_arguments_that_are_read() -> None:
    names = inspect.signature(c10d._new_process_group_helper).parameters
    assert {
        *("group_size", "global_ranks_in_group", "backend", "group_name"),
        *("backend_options", "timeout"),
    } <= set(names)
    code = inspect.getsource(c10d.init_process_group)
    assert "= rendezvous(" in code
    assert "_new_process_group_helper(" in code
    assert "_new_process_group_helper(" in inspect.getsource(c10d._new_group_with_tag)


def test_a_backend_of_a_new_type_is_used_and_a_known_type_is_used_again(
    world: dist.ProcessGroup,
) -> None:
    cpu = torch.device("cpu")
    first = world._get_backend(cpu)
    backend = backends.fake(0, 1, fails=False)
    world._register_backend(cpu, BackendType(255), backend)
    assert world._get_backend(cpu).name() == "fake"
    world._register_backend(cpu, BackendType.GLOO, backend)
    assert world._get_backend(cpu) is first
    assert {device.type for device in world._device_types} >= {"cpu"}


def test_sequence_numbers_of_a_backend_begin_at_zero_and_count_collectives() -> None:
    backend = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timeout=TIMEOUT)
    backend._set_sequence_number_for_group()
    assert backend._get_sequence_number_for_group() == 0
    backend.allreduce([torch.ones(1)]).wait()
    assert backend._get_sequence_number_for_group() == 1
    with pytest.raises(RuntimeError):
        backends.fake(0, 1, fails=False)._get_sequence_number_for_group()


def test_gloo_takes_devices_and_changes_its_timeout() -> None:
    devices = backends.GlooDevices()
    first = devices.create(dist.HashStore(), 0, 1, TIMEOUT)
    before = os.listdir("/proc/self/task")
    second = devices.create(dist.HashStore(), 0, 1, TIMEOUT)
    threads = set(os.listdir("/proc/self/task")) - set(before)
    give_up = time.monotonic() + 10.0
    names: list[str] = []
    while names != [backends._RUN_LOOP] * 2:  # no thread of another device
        assert time.monotonic() < give_up, names
        names = [Path(f"/proc/self/task/{one}/comm").read_text().strip() for one in threads]
    second._set_default_timeout(timedelta(seconds=33))
    assert second.options._timeout == timedelta(seconds=33)
    assert first.options._timeout == TIMEOUT


def test_gloo_closes_a_connection_that_was_cut() -> None:
    store, made = dist.HashStore(), []

    def connect(rank: int) -> None:
        made.append(dist.ProcessGroupGloo(store, rank, 2, timeout=TIMEOUT))

    before = backends.tcp_connections()
    other = threading.Thread(target=connect, args=(1,))
    other.start()
    connect(0)
    other.join()
    found = backends.tcp_connections() - before
    assert len(found) == 2  # both ends
    work = made[0].allreduce([torch.ones(1)])
    backends.cut(found)
    assert backends.await_end(found, 10.0)
    with pytest.raises(RuntimeError):
        work.wait()
    assert not found & backends.tcp_connections()
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert server.fileno()  # descriptors of the connections are used again


def test_await_end_does_not_wait_for_ever() -> None:
    before = backends.tcp_connections()
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    assert not backends.await_end(backends.tcp_connections() - before, 0.05)
    one.close()
    other.close()


def test_names_of_ddp() -> None:
    ddp = DistributedDataParallel(nn.Linear(2, 2))
    for name in ("_reset_state", "_rebuild_buckets", "_update_process_group"):
        assert hasattr(ddp.reducer, name), name
    for name in ("_has_rebuilt_buckets", "_comm_hooks", "_delay_all_reduce_params"):
        assert hasattr(ddp, name), name
    assert not ddp._get_ddp_logging_data().get("comm_hook")
    ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    assert ddp._get_ddp_logging_data().get("comm_hook")
    (bucket,) = ddp.reducer._get_zeros_like_grad_buckets()
    assert {id(one) for one in bucket.parameters()} == {id(one) for one in ddp.parameters()}
    code = inspect.getsource(DistributedDataParallel._update_process_group)
    assert "_reset_state()" in code
    assert "_has_rebuilt_buckets = False" in code


def test_names_of_fsdp2() -> None:
    model = fully_shard(nn.Linear(2, 2))
    assert isinstance(model, FSDPModule)
    state = model._get_fsdp_state()
    assert state._is_root is None
    (group,) = state._fsdp_param_groups
    model(torch.ones(1, 2)).sum().backward()
    assert state._is_root
    assert group._all_gather_result is None
    for parameter in group.fsdp_params:
        assert parameter.unsharded_accumulated_grad is None
        assert parameter._unsharded_param.grad is None
    model.reset_iter_state()


def test_a_scaler_keeps_its_stages_where_they_are_cleared() -> None:
    scaler = torch.amp.GradScaler("cpu")
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters())
    scaler.scale(layer(torch.ones(2)).sum()).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.unscale_(optimizer)
    scaler._per_optimizer_states.clear()
    scaler.unscale_(optimizer)
