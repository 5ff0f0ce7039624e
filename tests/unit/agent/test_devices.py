"""Error counters of network cards and GPUs."""

import sys
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from ftrun.agent.observe.devices import EVERY_S, DeviceCounters, RecentDeviceErrors


def count(system: Path, where: str, value: object) -> None:
    path = system / "class" / where
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{value}\n")


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
    assert made.poll(1.0 + EVERY_S, on_device=False) == (
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


class Driver:
    """NVML of one GPU, with the interface of its package."""

    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = NVML_VOLATILE_ECC = 1
    nvmlClocksThrottleReasonHwSlowdown = 8  # noqa: N815 - the driver's own names
    nvmlClocksThrottleReasonSwThermalSlowdown = 32  # noqa: N815
    nvmlEventTypeXidCriticalError = 8  # noqa: N815

    def __init__(self) -> None:
        self.errors, self.reasons = 0, 0
        self.xids: list[int] = []

    def __getattr__(self, name: str) -> Any:
        answers: dict[str, Any] = {
            "nvmlInit": lambda: None,
            "nvmlDeviceGetCount": lambda: 1,
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetIndex": lambda device: device,
            "nvmlEventSetCreate": lambda: "set",
            "nvmlDeviceRegisterEvents": lambda *_: None,
            "nvmlDeviceGetTotalEccErrors": lambda *_: self.errors,
            "nvmlDeviceGetCurrentClocksThrottleReasons": lambda _: self.reasons,
            "nvmlEventSetWait_v2": lambda *_: self._wait(),
        }
        return answers[name]

    def _wait(self) -> SimpleNamespace:
        if not self.xids:
            raise TimeoutError
        return SimpleNamespace(device=0, eventData=self.xids.pop())


def test_gpus_are_checked_where_ranks_use_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    driver = Driver()
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    made = DeviceCounters(tmp_path)
    assert made.poll(1.0, on_device=True) == ()
    driver.errors, driver.reasons, driver.xids = 2, 8, [79]
    assert made.poll(10.0, on_device=True) == (
        "GPU 0 uncorrectable memory errors: 2 more",
        "GPU 0 is slowed down (reasons 0x8)",
        "GPU 0 has reported XID 79",
    )
    assert made.poll(20.0, on_device=True) == (), "it is still throttled"


def test_without_a_driver_nothing_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    made = DeviceCounters(tmp_path)
    assert [made.poll(at, on_device=True) for at in (1.0, 9.0)] == [(), ()]


def test_troubles_are_kept_for_a_while() -> None:
    made, news = RecentDeviceErrors(), SimpleQueue[str]()
    for text in ("a", "b", "a"):
        news.put(text)
    assert made.take(news, now_s=10.0) == ["a", "b", "a"]
    assert made.recent == ("a", "b")
    assert made.take(news, now_s=60.0) == []
    assert made.recent == ("a", "b")
    made.take(news, now_s=200.0)
    assert made.recent == ()
