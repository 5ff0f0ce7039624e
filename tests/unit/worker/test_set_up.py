"""The record of a set-up, and a set-up alone that gets its results from the record."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel

from ftrun.errors import SetUpDiffers
from ftrun.worker.survivors import set_up
from ftrun.worker.survivors.groups import ProcessGroups
from ftrun.worker.survivors.set_up import MAX_BYTES, SetUp


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "0")
    monkeypatch.setattr(DistributedDataParallel, "__init__", DistributedDataParallel.__init__)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def first_life(script: Callable[[], Any]) -> SetUp:
    if dist.is_initialized():
        dist.destroy_process_group()
    groups = ProcessGroups()
    set_up = SetUp(groups, generation=4)
    dist.init_process_group("gloo")
    try:
        script()
    finally:
        set_up.finish()
        groups.close()
    return set_up


def alone(script: Callable[[], Any], record: dict[str, Any], world: int = 3) -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    groups = ProcessGroups()
    set_up = SetUp(groups, lambda: record)
    dist.init_process_group("gloo", rank=1, world_size=world)
    try:
        script()
        set_up.finish()
        assert set_up.origin == 4
        assert set_up.export() == record
    finally:
        set_up._is_over or set_up._local.close()  # type: ignore[union-attr]
        for module, name, original, _ in set_up._replaced:
            setattr(module, name, original)
        groups.close()


def test_a_set_up_alone_gets_the_results_of_the_first_one() -> None:
    seed: list[Any] = [1234]
    total, parts = torch.full((2,), 3.0), [torch.zeros(2)]

    def script() -> None:
        dist.broadcast_object_list(seed, src=0)
        dist.all_reduce(total)
        dist.barrier()
        dist.all_gather(parts, total)
        group = dist.new_group([0])
        dist.broadcast(total[:1], src=0, group=group)

    set_up = first_life(script)
    assert (set_up.problem, set_up.unknown([])) == ("", "")
    seed[:], total[:], parts[0][:] = [0], 0.0, 0.0
    record = set_up.export()

    def again() -> None:
        dist.broadcast_object_list(seed, src=0)
        dist.all_reduce(total)
        dist.barrier()
        dist.all_gather(parts, total)
        assert dist.get_backend() == "gloo"
        assert (dist.get_rank(), dist.get_world_size()) == (1, 3)
        dist.new_group([0])  # without this rank
        dist.broadcast(total[:1], src=0, group=dist.new_group([1]))

    with pytest.raises(SetUpDiffers, match="in place of broadcast of group 1"):
        alone(again, record)  # of another group
    assert seed == [1234]
    assert total.tolist() == [3.0, 3.0]
    assert parts[0].tolist() == [3.0, 3.0]


def test_other_calls_than_recorded_end_the_set_up() -> None:
    record = first_life(lambda: dist.all_reduce(torch.zeros(2))).export()
    with pytest.raises(SetUpDiffers, match=r"float32\[3\] at test_set_up.py:\d+, in place of"):
        alone(lambda: dist.all_reduce(torch.zeros(3)), record)
    with pytest.raises(SetUpDiffers, match="the end of the set-up, in place of all_reduce"):
        alone(lambda: None, record)
    with pytest.raises(SetUpDiffers, match="in place of the first turn"):
        alone(lambda: [dist.all_reduce(torch.zeros(2)) for _ in range(2)], record)
    with pytest.raises(SetUpDiffers, match=r"send at test_set_up.py"):
        alone(lambda: dist.send(torch.zeros(1), dst=0), record)


def test_a_large_result_is_known_only_if_it_is_attached() -> None:
    weight = torch.zeros(MAX_BYTES // 4 + 1)
    set_up = first_life(lambda: dist.broadcast(weight[1:], src=0))
    assert set_up.problem == ""
    assert set_up.unknown([weight]) == ""
    reason = set_up.unknown([weight[2:]])
    assert reason.startswith("test_set_up.py:")
    assert reason.endswith("before the first turn, into a tensor that is not attached")
    weight = torch.zeros(1)  # the storage that was written to is freed
    assert set_up.unknown([weight]) != ""


def test_the_result_of_an_asynchronous_call_is_not_recorded() -> None:
    x = torch.zeros(4)

    def script() -> None:
        work = dist.all_reduce(x, async_op=True)
        assert work is not None
        work.wait()

    set_up = first_life(script)
    assert set_up.unknown([]) != ""
    assert set_up.unknown([x]) == ""
    alone(script, set_up.export())


def functional_all_reduce() -> None:
    functional.wait_tensor(functional.all_reduce(torch.ones(1), "sum", dist.group.WORLD))


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        (functional_all_reduce, "1 collectives of group 0"),
        (lambda: dist.broadcast_object_list([object()], src=0), "a object cannot be recorded"),
        (lambda: dist.broadcast_object_list(["x" * MAX_BYTES], src=0), "at most 262,144 bytes"),
        (lambda: [dist.barrier() for _ in range(1001)], "more than 1,000 collectives"),
        (lambda: dist.batch_isend_irecv([]), "calls batch_isend_irecv"),
    ],
)
def test_what_cannot_be_recorded_is_reported(script: Callable[[], Any], problem: str) -> None:
    def run() -> None:
        try:
            script()
        except (ValueError, IndexError):
            assert "batch" in problem  # torch refuses an empty batch

    assert problem in first_life(run).problem


def test_torch_has_its_own_functions_after_the_set_up() -> None:
    before, mine = dist.all_reduce, lambda *_: None
    first_life(lambda: None)
    assert dist.all_reduce is before
    reduce = dist.reduce
    first_life(lambda: setattr(dist, "reduce", mine))
    assert dist.reduce is mine
    dist.reduce = reduce


def test_a_store_of_the_script_is_reported() -> None:
    groups = ProcessGroups()
    set_up = SetUp(groups)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    set_up.finish()
    groups.close()
    assert set_up.problem == "init_process_group was given a store of the script"


class Rotary(nn.Module):
    """Has a buffer that no snapshot holds."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("angle", torch.tensor([value]), persistent=False)


def test_ddp_gives_the_buffers_that_no_snapshot_holds() -> None:
    first = Rotary(1.5)
    set_up = first_life(lambda: DistributedDataParallel(first))
    assert set_up.problem == ""
    assert set_up.unknown(first.parameters()) == ""
    assert "DistributedDataParallel of 2 parameters" in set_up.unknown([])
    other = Rotary(7.0)
    alone(lambda: DistributedDataParallel(other), set_up.export())
    assert other.angle.item() == 1.5


@pytest.mark.parametrize(("owner", "name"), [(set_up._Output, "of"), (ProcessGroups, "calls")])
def test_a_bug_here_costs_the_stay_and_not_the_script(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    def breaks(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a bug")

    x = torch.zeros(2)

    def script() -> None:
        with monkeypatch.context() as during:
            during.setattr(owner, name, breaks)
            dist.all_reduce(x + 1)
            DistributedDataParallel(nn.Linear(1, 1))

    assert first_life(script).problem == "a bug in ftrun: ZeroDivisionError('a bug')"


def test_a_call_with_wrong_arguments_has_the_error_of_torch() -> None:
    def script() -> None:
        with pytest.raises(TypeError, match="all_reduce"):
            dist.all_reduce(torch.zeros(2), torch.zeros(2), None, False, 7)  # type: ignore[call-arg]

    first_life(script)
