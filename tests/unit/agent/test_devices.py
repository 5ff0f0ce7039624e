"""Error counters of network cards and GPUs."""

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from queue import SimpleQueue

import pytest
from fake_nvml.fake import STATE, search_path

from ftrun.agent.observe.devices import EVERY_S, DeviceCounters, RecentDeviceErrors
from ftrun.monitor.device_faults import DeviceReport


def count(system: Path, where: str, value: object) -> None:
    path = system / "class" / where
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{value}\n")


def texts(reports: Iterable[DeviceReport]) -> tuple[str, ...]:
    return tuple(report.text for report in reports)


def test_what_a_card_has_counted_since_the_last_look_is_reported(tmp_path: Path) -> None:
    made = DeviceCounters(tmp_path)
    count(tmp_path, "net/eth0/statistics/rx_errors", 1_000)
    count(tmp_path, "net/eth0/carrier_down_count", 3)
    count(tmp_path, "net/lo/statistics/rx_errors", 0)
    count(tmp_path, "infiniband/mlx5_0/ports/1/counters/symbol_error", 5)
    assert made.poll(1.0, on_device=False) == (), "earlier errors are not reported"
    count(tmp_path, "net/eth0/statistics/rx_errors", 1_012)
    count(tmp_path, "net/eth0/statistics/tx_dropped", 7)
    count(tmp_path, "net/eth0/carrier_down_count", 4)
    count(tmp_path, "net/lo/statistics/rx_errors", 50)
    count(tmp_path, "infiniband/mlx5_0/ports/1/counters/symbol_error", 9)
    assert made.poll(1.0 + EVERY_S / 2, on_device=False) == ()
    assert texts(made.poll(1.0 + EVERY_S, on_device=False)) == (
        "eth0: link lost 1 times",
        "eth0 rx errors: 12 more",
        "mlx5_0 port 1 symbol error: 4 more",
    )
    assert made.poll(1.0 + 2 * EVERY_S, on_device=False) == ()


def test_a_counter_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    count(tmp_path, "net/eth0/statistics/rx_errors", "what")
    made = DeviceCounters(tmp_path)
    assert [made.poll(at, on_device=False) for at in (1.0, 9.0)] == [(), ()]


def test_this_machine_can_be_checked() -> None:
    made = DeviceCounters()
    assert made.poll(1.0, on_device=True) == ()


IN_A_PROCESS = """
import os
import sys
from pathlib import Path
from fake_nvml.fake import LOST, NO_PERMISSION, FakeGpus, load
from ftrun.agent.observe import devices
from ftrun.agent.observe.devices import EVERY_S, BoundedCall, DeviceCounters, Gpus, device_health

def texts(made):
    return [report.text for report in made.poll()]

def faults(made):
    return [report.text for report in made.poll() if report.is_fault]

load(before_535=len(sys.argv) > 3)
gpus = FakeGpus(Path(sys.argv[1]), 3)
"""


def in_a_process(folder: Path, code: str, *arguments: str) -> None:
    """Run code in a process in which the package of NVML has the library of the tests."""
    state = folder / "gpus"
    done = subprocess.run(
        [sys.executable, "-c", IN_A_PROCESS + code, str(state), str(folder), *arguments],
        env={**os.environ, STATE: str(state), "PYTHONPATH": search_path()},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("arguments", [(), ("before driver 535",)])
def test_gpus_are_checked_where_ranks_use_them(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    code = """
gpus.count_errors(0, 7)
made = Gpus()
assert texts(made) == [], "earlier errors are not reported"
gpus.count_errors(0, 9)
gpus.slow_down(1, 8)
gpus.report_xid(2, 94)
gpus.report_xid(0, 31)
assert texts(made) == [
    "GPU 0 uncorrectable memory errors: 2 more",
    "GPU 1 is slowed down (reasons 0x8)",
    "GPU 0 has reported XID 31",
    "GPU 2 has reported XID 94 (contained memory error)",
], "in the order of the devices"
assert texts(made) == [], "it is still slowed down"
gpus.slow_down(1, 4)
assert texts(made) == []
gpus.slow_down(1, 0x28)
assert texts(made) == ["GPU 1 is slowed down (reasons 0x28)"]
"""
    in_a_process(tmp_path, code, *arguments)


def test_a_lost_gpu_hides_neither_itself_nor_the_others(tmp_path: Path) -> None:
    code = """
made = Gpus()
assert texts(made) == []
gpus.report_xid(1, 79)
gpus.fail(1, LOST)
gpus.count_errors(2, 1)
assert texts(made) == [
    "GPU 1 does not answer: GPU is lost",
    "GPU 2 uncorrectable memory errors: 1 more",
    "GPU 1 has reported XID 79 (the GPU has fallen off the bus)",
]
assert texts(made) == []
gpus.fail(1, 0)
assert texts(made) == []
gpus.fail(1, LOST, gives_handle=True)
assert texts(made) == ["GPU 1 does not answer: GPU is lost"]
assert texts(Gpus()) == ["GPU 1 does not answer: GPU is lost"], "lost from the start"
"""
    in_a_process(tmp_path, code)


def test_a_gpu_that_knows_less_hides_nothing_of_the_others(tmp_path: Path) -> None:
    code = """
gpus.refuse_events(0)
gpus.count_errors(0, 2**64 - 1)  # unknown
gpus.slow_down(0, 2**64 - 1)
made = Gpus()
assert texts(made) == []
gpus.report_xid(0, 31)
gpus.report_xid(2, 48)
assert texts(made) == ["GPU 2 has reported XID 48 (double-bit memory error)"]
"""
    in_a_process(tmp_path, code)


def test_faults_of_the_hardware_are_told_from_those_of_a_program(tmp_path: Path) -> None:
    code = """
import os
made = Gpus()
assert faults(made) == []
for number in (13, 31, 43, 94):
    gpus.report_xid(0, number)
gpus.slow_down(1, 8)
assert faults(made) == []
gpus.report_xid(1, 94)
assert faults(made) == [], "the first one of this GPU"
gpus.report_xid(0, 94)
gpus.report_xid(1, 79)
assert faults(made) == [
    "GPU 0 has reported XID 94 (contained memory error)",
    "GPU 1 has reported XID 79 (the GPU has fallen off the bus)",
]
gpus.count_errors(2, 1)
assert faults(made) == ["GPU 2 uncorrectable memory errors: 1 more"]
gpus.need_action(2, 1)
assert faults(made) == ["GPU 2 needs a reset"]
assert faults(made) == [], "once"
gpus.fail(0, LOST)
assert faults(made) == ["GPU 0 does not answer: GPU is lost"]
os.environ["CUDA_VISIBLE_DEVICES"] = "0,2"
gpus.report_xid(1, 79)
assert faults(made) == [], "a GPU that the ranks do not use"
gpus.report_xid(2, 79)
assert len(faults(made)) == 1
os.environ["CUDA_VISIBLE_DEVICES"] = "GPU-1"
gpus.report_xid(1, 79)
assert len(faults(made)) == 1, "names are not compared"
"""
    in_a_process(tmp_path, code)


def test_a_driver_that_hangs_is_reported_and_blocks_nothing(tmp_path: Path) -> None:
    code = """
import time
devices._UNRESPONSIVE_S = 0.3
made = DeviceCounters(Path(sys.argv[2]))
now = iter(range(0, 1000, int(EVERY_S)))
def poll():
    began_s = time.monotonic()
    found = made.poll(1.0 + next(now), on_device=True)
    assert time.monotonic() - began_s < 60.0
    return tuple(report.text for report in found)
while made._gpus is None or made._gpus.unresponsive_s:
    assert poll() == ()
gpus.hang(True)
assert poll() == ()
time.sleep(0.3)
(text,) = poll()
assert text.startswith("the GPUs' driver (NVML) has not answered for "), text
assert poll() == (), "once"
gpus.hang(False)
gpus.report_xid(0, 13)
found = ()
while not found:
    found = made.poll(1.0 + next(now), on_device=False)
assert found[0].text == "GPU 0 has reported XID 13", found
"""
    in_a_process(tmp_path, code)


def test_the_preflight_checks_all_gpus(tmp_path: Path) -> None:
    code = """
def check(change, undo, *, faults=(), remarks=()):
    change()
    assert device_health() == (3, faults, remarks), device_health()
    undo()

unknown, remap = 2**64 - 1, gpus.remap
check(lambda: None, lambda: None)
check(lambda: gpus.count_errors(0, unknown), lambda: gpus.count_errors(0, 0))
check(lambda: gpus.slow_down(0, unknown), lambda: gpus.slow_down(0, 0))
check(lambda: gpus.slow_down(1, 8), lambda: gpus.slow_down(1, 0),
      remarks=("GPU 1 is slowed down (reasons 0x8)",))
check(lambda: gpus.count_errors(2, 3), lambda: gpus.count_errors(2, 0),
      faults=("GPU 2 has 3 uncorrectable memory errors since its reset",))
check(lambda: remap(0, is_pending=True, has_failed=False), lambda: None,
      faults=("GPU 0 needs a reset: rows of its memory are to be replaced",))
check(lambda: remap(0, is_pending=True, has_failed=True), lambda: None,
      faults=("GPU 0 could not replace a broken row of its memory",))
check(lambda: gpus.fail(0, LOST, gives_handle=True), lambda: None,
      faults=("GPU 0 does not answer: GPU is lost",))
check(lambda: gpus.fail(0, LOST), lambda: gpus.fail(0, NO_PERMISSION),
      faults=("GPU 0 does not answer: GPU is lost",))
assert device_health() == (2, (), ())
gpus.need_action(2, 1)
needs_reset = ("GPU 2 needs a reset",)
assert device_health() == (2, needs_reset, ()), device_health()
os.environ["CUDA_VISIBLE_DEVICES"] = "0,1"
assert device_health() == (2, (), needs_reset), "the ranks do not use it"
del os.environ["CUDA_VISIBLE_DEVICES"]
gpus.need_action(2, 0)
assert texts(Gpus()) == [], "a GPU of another job"
"""
    in_a_process(tmp_path, code)


def test_without_a_driver_nothing_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    made = DeviceCounters(tmp_path)
    assert [made.poll(at, on_device=True) for at in (1.0, 9.0)] == [(), ()]


def test_troubles_are_kept_for_a_while() -> None:
    made, news = RecentDeviceErrors(""), SimpleQueue[DeviceReport]()
    for text in ("a", "b", "a"):
        news.put(DeviceReport(text))
    assert made.take(news, now_s=10.0) == ["a", "b", "a"]
    assert made.recent == ("a", "b")
    assert made.take(news, now_s=60.0) == []
    assert made.recent == ("a", "b")
    assert made.fault == ""
    for text in ("GPU 1 is lost", "GPU 2 is lost"):
        news.put(DeviceReport(text, is_fault=True))
    made.take(news, now_s=61.0)
    made.take(news, now_s=200.0)
    assert made.recent == ()
    assert made.fault == "GPU 1 is lost", "it stays until the run ends"


def test_the_fault_that_an_earlier_agent_has_found_stays_the_first() -> None:
    made, news = RecentDeviceErrors("GPU 1 is lost"), SimpleQueue[DeviceReport]()
    assert made.take(news, now_s=1.0) == []
    news.put(DeviceReport("GPU 2 is lost", is_fault=True))
    made.take(news, now_s=2.0)
    assert made.fault == "GPU 1 is lost"
