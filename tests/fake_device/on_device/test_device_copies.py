"""The copies of one snapshot, and the same with one wait left out at a time.

Every tensor holds the number of its updates plus a number of its own, so a copy of another moment
or of another tensor has another number. The tests without a wait must find wrong bytes: they prove
that the other tests would notice.
"""

import gc
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from fake_device import fake

from ftrun import clock
from ftrun.snapshot.layout import CopyTiming, make_layout
from ftrun.worker.capture import device_copies, device_sources
from ftrun.worker.capture.copying import SlotCopy, SlotViews, digest_of
from ftrun.worker.capture.device_copies import Device
from ftrun.worker.capture.device_sources import DeviceCopies, SumChunk
from ftrun.worker.capture.lazy_check import bits_of
from ftrun.worker.state.state_tree import source_of
from ftrun.worker.state.tensors import HostCopy

DEVICE = torch.device("privateuseone", 0)  # its name "fake" is unknown while tests are collected
Event = torch.Event
BUFFER_BYTES = 1 << 19
NUM_STEPS = 4
PATIENCE_S = 0.2
"""Longest wait of the copy for the training thread, which may wait for the copy."""


@pytest.fixture(autouse=True)
def own_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_copies, "_devices", {})


def made(shape: tuple[int, ...], device: torch.device = DEVICE) -> torch.Tensor:
    return torch.zeros(shape, device=device)


def some_tensors() -> dict[str, torch.Tensor]:
    return {
        "large": made((700, 701)),
        "channels last": made((40, 64, 9, 9)).to(memory_format=torch.channels_last),
        "transposed": made((3, 200_000)).t(),
        **{f"small {number}": made((number + 1, 5)) for number in range(12)},
        "one": made((1,)),
    }


class Snapshots:
    """A training thread that updates tensors, and a copy thread that copies them."""

    def __init__(
        self,
        tensors: dict[str, torch.Tensor],
        schedule: str,
        left_out: str,
        *,
        is_staged: bool = False,
        has_sums: bool = True,
        gb_s: float = 0.0,
    ) -> None:
        self.schedule, self.left_out, self.is_staged = schedule, left_out, is_staged
        self.has_sums, self.gb_s = has_sums, gb_s
        self.tensors = tensors
        self.buffer = made((3000,))
        for number, one in enumerate(tensors.values()):
            one.add_(1000.0 * number)
        sources = [source_of(name, one, CopyTiming.LAZY) for name, one in tensors.items()]
        sources.append(source_of("buffer", self.buffer, CopyTiming.BOUNDARY))
        self.layout = make_layout([one.entry for one in sources], plain_bytes=8)
        self.image = bytearray(self.layout.image_bytes)
        self.views = SlotViews(self.layout, memoryview(self.image))
        self.copy: SlotCopy = self.views.prepare(sources, (), ())
        self.table = memoryview(np.zeros(len(self.layout.pieces), np.uint64)).cast("B").cast("Q")
        self.has_updated = threading.Event()
        self.thread: threading.Thread | None = None
        self.sums = b""

    def boundary(self) -> None:
        self.mark()
        self.has_updated.clear()
        self.thread = threading.Thread(target=self._copy)
        self.thread.start()
        if self.schedule == "copier first":
            self.thread.join()

    def mark(self) -> None:
        self.copy.copy_boundary(is_staged=self.is_staged, gb_s=self.gb_s)
        tensors = [one for one in self.tensors.values() if one.device == DEVICE]
        if tensors and self.has_sums:
            chunk = sums_over(tensors)
            assert self.copy.on_devices.read_sums(DEVICE, chunk, self._take_sums)

    def _take_sums(self, content: np.ndarray) -> None:
        self.sums = content.tobytes()

    def _copy(self) -> None:
        if self.left_out in ("update", "issued"):
            self.has_updated.wait(5.0)
        self.copy.copy_lazy(self.table)

    def forward(self) -> None:
        self.buffer.add_(100.0)

    def update(self) -> None:
        if self.left_out != "update":
            self.copy.on_devices.precede()
        for one in self.tensors.values():
            one.add_(1.0)
        if self.schedule == "trainer first":
            torch.accelerator.current_stream(DEVICE).synchronize()  # as loss.item() does
            self.has_updated.set()

    def wrong(self, step: int) -> set[str]:
        """Names of the tensors whose copy is of another moment; also checks the digests."""
        assert self.thread is not None
        self.thread.join()
        found = {
            name
            for number, name in enumerate(self.tensors)
            if not bool((self.views.target(name) == step + 1000.0 * number).all())
        }
        if not bool((self.views.target("buffer") == 100.0 * step).all()):
            found.add("buffer")
        right = [
            torch.full_like(self.views.target(name), step + 1000.0 * number)
            for number, (name, one) in enumerate(self.tensors.items())
            if one.device == DEVICE
        ]
        if self.sums != (sums_of(right) if right and self.has_sums else b""):
            found.add("sums")
        for index, piece in enumerate(self.layout.pieces):
            content = self.views.bytes[piece.offset : piece.offset + piece.num_bytes]
            assert not piece.num_bytes or self.table[index] == digest_of(content)
        return found


def run(
    monkeypatch: pytest.MonkeyPatch,
    schedule: str,
    left_out: str = "",
    tensors: Callable[[], dict[str, torch.Tensor]] = some_tensors,
    *,
    is_staged: bool = False,
) -> set[str]:
    """Train; return the names of the tensors that some snapshot has wrong."""
    for module in (device_copies, device_sources):
        monkeypatch.setattr(module, "BUFFER_BYTES", BUFFER_BYTES)
    if schedule == "trainer first":
        monkeypatch.setattr(device_copies, "NUM_BUFFERS", 1000)
    found: set[str] = set()
    snapshots = Snapshots(tensors(), schedule, left_out, is_staged=is_staged)
    if schedule == "trainer first":
        drain = Device.drain

        def later(device: Device) -> None:
            snapshots.has_updated.wait(PATIENCE_S)
            drain(device)

        monkeypatch.setattr(Device, "drain", later)
    _leave_out(monkeypatch, left_out)
    for step in range(NUM_STEPS):
        snapshots.forward()
        if step:
            snapshots.update()
            found |= snapshots.wrong(step)
        else:
            for one in snapshots.tensors.values():
                one.add_(1.0)
        snapshots.boundary()
    snapshots.has_updated.set()
    return found | snapshots.wrong(NUM_STEPS)


class Unawaited:
    """An event for which no thread waits."""

    def __init__(self) -> None:
        self.event = Event(DEVICE)

    def record(self, stream: torch.Stream) -> None:
        self.event.record(stream)

    def synchronize(self) -> None:
        pass


def _leave_out(monkeypatch: pytest.MonkeyPatch, wait: str) -> None:
    if wait == "begun":
        monkeypatch.setattr(Device, "follow", lambda device: None)
    elif wait == "issued":
        monkeypatch.setattr(DeviceCopies, "precede", _order)
    elif wait == "stream":
        monkeypatch.setattr(DeviceCopies, "precede", lambda copies: copies.issued.wait())
    elif wait == "kept":
        precede = Device.precede

        def wait_and_order(copies: DeviceCopies) -> None:
            copies.issued.wait()
            _order(copies, precede)

        monkeypatch.setattr(DeviceCopies, "precede", wait_and_order)
        monkeypatch.setattr(Device, "precede", lambda device, event: None)
    elif wait == "record":
        monkeypatch.setattr(Device, "record", lambda device: Event(device.device))
    elif wait == "drain":
        monkeypatch.setattr(torch, "Event", lambda device: Unawaited())
    elif wait == "reuse":
        monkeypatch.setattr(Device, "_free_buffer", lambda device, n: _first(device))


def _order(copies: DeviceCopies, precede: Callable[..., None] = Device.precede) -> None:
    for one in copies._of_device:
        if one.copied is not None:
            precede(one.device, one.copied)


def _first(device: Device) -> device_copies._Buffer:
    if not device._buffers:
        device._buffers.append(device._made(BUFFER_BYTES))
    return device._buffers[0]


@pytest.fixture(params=["default stream", "own stream"])
def stream(request: pytest.FixtureRequest) -> torch.Stream:
    if request.param == "own stream":
        return torch.Stream(DEVICE)
    return torch.accelerator.current_stream(DEVICE)


@pytest.mark.parametrize("is_staged", [False, True], ids=["", "staged"])
@pytest.mark.parametrize("schedule", ["free", "copier first", "trainer first"])
@pytest.mark.parametrize("mode", ["lazy", "threads", "eager"])
def test_each_copy_is_of_its_boundary(
    mode: str,
    schedule: str,
    is_staged: bool,
    stream: torch.Stream,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with stream:
        assert run(monkeypatch, schedule, is_staged=is_staged) == set()


@pytest.mark.parametrize("schedule", ["free", "trainer first"])
@pytest.mark.parametrize("mode", ["lazy", "threads"])
def test_two_threads_copy_the_same_bytes(
    mode: str, schedule: str, second_thread: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(monkeypatch, schedule) == set()
    assert second_thread


@pytest.mark.parametrize("pinned_bytes", [0, 3 * BUFFER_BYTES // 2])
@pytest.mark.parametrize("mode", ["lazy", "threads"])
def test_without_page_locked_memory_copies_are_of_their_boundary_and_the_reason_is_known(
    mode: str, pinned_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_copies, "_refusals", [])
    fake.set_pinned_limit(pinned_bytes)
    try:
        assert run(monkeypatch, "free") == set()
    finally:
        fake.set_pinned_limit()
    reason = device_copies.slow_reason()
    assert "(fake device: out of memory, no more pinned memory is allowed)" in reason
    assert "ulimit -l" in reason
    assert run(monkeypatch, "free") == set()
    assert device_copies.slow_reason() == reason  # other buffers of the process are still pageable


@pytest.mark.parametrize("left_out", ["", "drop_error"])
def test_a_refusal_does_not_fail_the_next_kernel_of_the_script(
    left_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_copies, "_refusals", [])
    if left_out:
        monkeypatch.setattr(device_copies, left_out, lambda device: None)
    value = torch.zeros(4, device=DEVICE)
    fake.set_pinned_limit(0)
    try:
        Device(DEVICE, num_buffers=1).prepare()
        if left_out:
            with pytest.raises(RuntimeError, match="out of memory, of an earlier call"):
                value.add_(1)
        assert HostCopy(value).awaited().tolist() == [0.0] * 4
        assert value.add_(1).tolist() == [1.0] * 4
    finally:
        fake.set_pinned_limit()


def test_with_page_locked_memory_there_is_no_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_copies, "_refusals", [])
    assert run(monkeypatch, "free") == set()
    assert device_copies.slow_reason() == ""


def test_an_update_waits_for_the_clones_and_not_for_the_copies() -> None:
    snapshots = Snapshots(some_tensors(), "free", "", is_staged=True)
    in_use = fake.bytes_in_use()
    for step in range(2):
        snapshots.mark()
        snapshots.update()  # no copy has begun
        snapshots.copy.copy_lazy(snapshots.table)
        snapshots.thread = threading.Thread()
        snapshots.thread.start()
        assert snapshots.wrong(step) <= {"buffer"}
        assert fake.bytes_in_use() == in_use, "the clones are freed"


def test_an_update_of_state_in_cpu_memory_waits_for_its_copy() -> None:
    """Also if all other state could be staged."""
    tensors = {"here": torch.zeros(700, 701), "there": made((700, 701))}
    snapshots = Snapshots(tensors, "free", "", is_staged=True)
    snapshots.mark()
    snapshots.thread = threading.Timer(PATIENCE_S, snapshots._copy)
    snapshots.thread.start()
    snapshots.update()
    assert snapshots.wrong(0) == set()


@pytest.mark.parametrize("is_known", [True, False])
def test_without_room_on_the_device_nothing_is_staged(
    is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state has 5.2 MB. A tenth must stay free, and others may take memory after the check."""
    if not is_known:
        monkeypatch.setattr(Device, "has_room", lambda *_, **__: True)
    gc.collect()  # earlier tests may have left tensors, which would be freed in the middle
    snapshots = Snapshots(some_tensors(), "copier first", "", is_staged=True, has_sums=False)
    _, limit = torch.get_device_module(DEVICE).mem_get_info(DEVICE)
    fake.set_memory_limit(fake.bytes_in_use() + (6 << 20 if is_known else 5_100_000))
    try:
        snapshots.boundary()
        assert snapshots.wrong(0) == set()
        assert not any(one.stage() for one in snapshots.copy.on_devices._of_device)
    finally:
        fake.set_memory_limit(limit)


def test_sums_follow_the_bytes_and_not_the_device() -> None:
    """Equal on two devices; one bit or two swapped words of any tensor change them."""
    tensors = list(some_tensors().values())
    for number, one in enumerate(tensors):
        one.add_(torch.arange(one.numel(), device=DEVICE).view(one.shape) + number)
    before = sums_of(tensors)
    assert before == sums_of([one.to("fake:1") for one in tensors])
    assert before == sums_of([one.cpu() for one in tensors])
    for at, one in enumerate(tensors):
        flipped = one.clone()
        flipped.view(torch.int32)[-1:].bitwise_xor_(1 << 5)
        assert sums_of([*tensors[:at], flipped, *tensors[at + 1 :]]) != before
        if one.numel() > 1:
            swapped = one.flip(0) if one.shape[0] > 1 else one.flip(1)
            assert sums_of([*tensors[:at], swapped, *tensors[at + 1 :]]) != before


def no_memory(_tensor: torch.Tensor) -> torch.Tensor:
    raise torch.OutOfMemoryError("injected")


def test_an_error_in_the_sums_costs_only_the_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_sources, "_sums", no_memory)
    snapshots = Snapshots(some_tensors(), "copier first", "")
    snapshots.boundary()
    monkeypatch.undo()
    assert snapshots.wrong(0) == {"sums"}


def test_an_error_in_the_clones_of_sums_costs_only_the_sums(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    snapshots = Snapshots(some_tensors(), "copier first", "", is_staged=True, has_sums=False)
    snapshots.mark()
    chunk = sums_over(list(snapshots.tensors.values()))
    monkeypatch.setattr(device_sources, "_sums", no_memory)
    assert not snapshots.copy.on_devices.read_sums(DEVICE, chunk, snapshots._take_sums)
    snapshots.thread = threading.Thread(target=snapshots._copy)
    snapshots.thread.start()
    assert snapshots.wrong(0) == set()


def test_samples_have_items_of_every_tensor() -> None:
    tensors = list(some_tensors().values())
    before = sums_of(tensors, 0)
    for at, one in enumerate(tensors):
        assert sums_of([*tensors[:at], one + 1.0, *tensors[at + 1 :]], 0) != before


def sums_over(tensors: list[torch.Tensor], num_whole: int | None = None) -> SumChunk:
    """Sums over some tensors, and samples of all.

    Of tensors in other orders, the items are sampled in the order of the memory: this device waits
    for `torch.take`.
    """
    dense = [one.permute(sorted(range(one.dim()), key=one.stride, reverse=True)) for one in tensors]
    return SumChunk(tensors[:num_whole], (), [[bits_of(one) for one in dense]], 0.4)


def sums_of(tensors: list[torch.Tensor], num_whole: int | None = None) -> bytes:
    return sums_over(tensors, num_whole).joined().cpu().numpy().tobytes()


LEFT_OUT = {
    **dict.fromkeys(("begun", "drain", "reuse"), "copier first"),
    **dict.fromkeys(("update", "issued", "stream", "record", "kept"), "trainer first"),
}


@pytest.mark.parametrize(
    ("left_out", "is_staged"),
    [
        *((left_out, False) for left_out in LEFT_OUT),
        *((left_out, True) for left_out in ("begun", "stream", "record")),  # for clones
    ],
)
def test_each_wait_is_needed(
    left_out: str, is_staged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with torch.Stream(DEVICE):
        assert run(monkeypatch, LEFT_OUT[left_out], left_out, is_staged=is_staged)


@pytest.mark.parametrize("mode", ["threads"])
def test_the_training_thread_waits_for_no_device(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of the boundary and nothing before the update needs what the device does."""
    monkeypatch.setattr(device_copies, "NUM_BUFFERS", 5)  # of four chunks, and of the sums
    snapshots = Snapshots(some_tensors(), "free", "")
    torch.accelerator.synchronize(DEVICE)
    is_open = threading.Event()
    fake.call_in_stream(DEVICE, lambda: _wait(is_open))
    snapshots.boundary()
    snapshots.update()
    is_open.set()
    assert snapshots.wrong(0) == set()


def _wait(is_open: threading.Event) -> None:
    assert is_open.wait(20.0)


@pytest.mark.parametrize("is_staged", [False, True], ids=["", "staged"])
def test_a_limited_copy_takes_its_time_in_the_copy_thread(
    is_staged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The update waits for the copy of its tensors, except if they are staged."""
    for module in (device_copies, device_sources):
        monkeypatch.setattr(module, "BUFFER_BYTES", BUFFER_BYTES)
    monkeypatch.setattr(device_copies, "NUM_BUFFERS", 1000)  # no wait for a free buffer
    tensors, gb_s = some_tensors(), 0.01
    num_bytes = sum(one.nbytes for one in tensors.values())
    snapshots = Snapshots(tensors, "free", "", is_staged=is_staged, gb_s=gb_s)
    snapshots.mark()
    snapshots.thread = threading.Thread(target=snapshots._copy)
    started_s = clock.now_s()
    snapshots.thread.start()
    snapshots.update()
    assert snapshots.thread.is_alive() or not is_staged
    least_s = (num_bytes - 2 * BUFFER_BYTES) / (gb_s * 1e9)  # nothing waits for the last chunk
    assert is_staged or clock.now_s() - started_s >= least_s
    snapshots.thread.join()
    assert clock.now_s() - started_s >= least_s
    assert snapshots.wrong(0) == set()


def test_a_limit_ends_when_the_training_waits_for_the_copy() -> None:
    tensors = some_tensors()
    snapshots = Snapshots(tensors, "free", "", is_staged=True, gb_s=1e-9)  # of years
    snapshots.mark()
    snapshots.thread = threading.Thread(target=snapshots._copy)
    snapshots.thread.start()
    snapshots.copy.on_devices.lift_limit()
    snapshots.thread.join(300)
    assert not snapshots.thread.is_alive()
    assert snapshots.wrong(0) == set()


def test_a_boundary_larger_than_its_buffer_is_copied_by_the_ring(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (device_copies, device_sources):
        monkeypatch.setattr(module, "BOUNDARY_BYTES", 1 << 10)
    assert run(monkeypatch, "copier first") == set()


def test_several_devices_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    def on_two() -> dict[str, torch.Tensor]:
        other = torch.device("fake:1")
        return {"one": made((900, 701)), "two": made((500, 901), other), "three": made((7,), other)}

    assert run(monkeypatch, "copier first", tensors=on_two) == set()


@pytest.mark.parametrize("name", ["large", "channels last", "transposed", "small 3", "one"])
def test_a_tensor_that_differs_from_its_copy_is_named(name: str) -> None:
    snapshots = Snapshots(some_tensors(), "copier first", "")
    snapshots.boundary()
    assert snapshots.copy.differing(snapshots.table) == []
    snapshots.tensors[name][-1:].add_(1.0)
    assert snapshots.copy.differing(snapshots.table) == [name]


def test_an_error_in_a_copy_leaves_the_buffers_usable() -> None:
    snapshots = Snapshots(some_tensors(), "copier first", "")
    table, snapshots.table = snapshots.table, memoryview(b"read-only" * 8).cast("Q")
    snapshots.copy.copy_boundary()
    with pytest.raises(TypeError):
        snapshots.copy.copy_lazy(snapshots.table)
    snapshots.table = table
    snapshots.boundary()
    assert snapshots.wrong(0) == set()


def test_an_error_in_the_second_thread_leaves_the_buffers_usable(
    second_thread: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshots = Snapshots({"large": made((4000, 701))}, "copier first", "")
    digest, is_first = device_sources.xxhash.xxh3_64_intdigest, [True]

    def in_first_thread_only(content: np.ndarray) -> int:
        if threading.current_thread().name.startswith("ftrun-copy-2") and is_first.pop():
            raise MemoryError("injected")
        return digest(content)

    snapshots.copy.copy_boundary()
    with monkeypatch.context() as patch:
        patch.setattr(device_sources.xxhash, "xxh3_64_intdigest", in_first_thread_only)
        with pytest.raises(MemoryError, match="injected"):
            snapshots.copy.copy_lazy(snapshots.table)
    snapshots.boundary()
    assert snapshots.wrong(0) == set()
    assert second_thread


def test_a_boundary_without_its_copy_leaves_nothing_behind() -> None:
    """An error between the two drops the snapshot; its bytes must not reach a later one."""
    tensors = some_tensors()
    dropped, snapshots = Snapshots(tensors, "copier first", ""), Snapshots({}, "copier first", "")
    dropped.copy.copy_boundary()
    snapshots.boundary()
    assert snapshots.wrong(0) == set()
    assert not bool((dropped.views.bytes != 0).any())


# --- to the device ------------------------------------------------------------------------------


def restored(monkeypatch: pytest.MonkeyPatch, left_out: str, shape: tuple[int, int]) -> bool:
    """Whether a tensor has the bytes of the host, after work of the script that came before."""
    monkeypatch.setattr(device_copies, "BUFFER_BYTES", BUFFER_BYTES)
    if left_out == "reuse":
        monkeypatch.setattr(torch, "Event", lambda device: Unawaited())
    device = Device(DEVICE, num_buffers=2)
    wanted = torch.arange(shape[0] * shape[1], dtype=torch.float32).view(shape)
    content = wanted.view(-1).view(torch.uint8).numpy()

    def fill(begin: int, end: int, buffer: device_copies.Bytes) -> None:
        np.copyto(buffer, content[begin:end])

    target = made((shape[1], shape[0])).t()
    target.fill_(-1.0)
    if left_out != "begun":
        device.follow()
    device.put(target, fill)
    if left_out == "begun":
        device.side.synchronize()  # before the work of the script
    if left_out != "record":
        device.precede(device.record())
    found = torch.equal(target.cpu(), wanted)
    torch.accelerator.synchronize(DEVICE)
    return found


@pytest.mark.parametrize("shape", [(900, 701), (1, 630_900)], ids=["strided", "contiguous"])
@pytest.mark.parametrize("left_out", ["", "begun", "reuse", "record"])
def test_each_wait_of_a_restore_is_needed(
    left_out: str, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert restored(monkeypatch, left_out, shape) is (not left_out)
