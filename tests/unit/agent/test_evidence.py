"""Evidence from outside of a rank: the end of its logs, and the pressure on its node."""

import os
import threading
from pathlib import Path

from ftrun import clock
from ftrun.agent.observe.evidence import (
    TAIL_BYTES,
    BoundedReads,
    PressureReader,
    WrittenErrors,
    tail,
)
from ftrun.monitor.slow.host_pressure import HostPressure

SOME = (
    "some avg10={} avg60=1.00 avg300=1.00 total=5\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"
)


def test_the_class_of_the_likely_cause_comes_first_from_either_stream(tmp_path: Path) -> None:
    (tmp_path / "stdout.log").write_text("OSError: [Errno 28] No space left on device\n")
    (tmp_path / "stderr.log").write_text("NCCL WARN Call to ibv_poll failed\nOver quota\n")
    found = WrittenErrors({"quota": "Over quota"}).find(str(tmp_path), "ValueError: loss is nan")
    assert [(one.error_class, one.source) for one in found] == [
        ("quota", "stderr.log"),
        ("disk full", "stdout.log"),
        ("NaN", "exception"),
    ]


def test_a_rank_without_log_files_has_its_exception_only() -> None:
    (found,) = WrittenErrors({}).find("", "Traceback\nMemoryError")
    assert (found.error_class, found.source) == ("out of memory", "exception")
    assert WrittenErrors({}).find("", "") == ()


def test_only_the_end_of_a_log_is_read(tmp_path: Path) -> None:
    path = tmp_path / "stderr.log"
    path.write_bytes(b"CUDA out of memory\n" + b"x" * TAIL_BYTES + b"\nlast \xff line")
    assert tail(str(path)) == ["last � line"]
    path.write_bytes(b"first\nlast")
    assert tail(str(path)) == ["first", "last"]


def test_what_is_no_regular_file_is_not_read_and_blocks_nothing(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "stderr.log")
    assert tail(str(tmp_path / "stderr.log")) == []
    assert tail(str(tmp_path / "missing")) == []
    assert tail(str(tmp_path)) == []


def test_a_file_system_that_does_not_answer_takes_the_deadline_once_and_one_thread() -> None:
    reads = BoundedReads()
    hanging, answer = os.pipe()
    try:
        before_s, threads = clock.now_s(), threading.active_count()
        assert reads.result(lambda: os.read(hanging, 1), 0.2) is None
        assert clock.now_s() - before_s >= 0.2
        for _ in range(20):
            assert reads.result(lambda: b"x", 60.0) is None
        assert clock.now_s() - before_s < 30.0
        assert threading.active_count() <= threads + 1
        os.write(answer, b"1")
        until_s = clock.now_s() + 60.0
        while (found := reads.result(lambda: b"x", 60.0)) is None:
            assert clock.now_s() < until_s
        assert found == b"x", "the late answer is not that of another read"
    finally:
        os.close(hanging)
        os.close(answer)


def test_a_read_that_fails_gives_none_and_the_next_one_works(tmp_path: Path) -> None:
    reads = BoundedReads()
    assert reads.result((tmp_path / "missing").read_bytes, 60.0) is None
    assert reads.result(lambda: 7, 60.0) == 7


def _pressure(folder: Path, name: str, **values: float) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for kind, value in values.items():
        (folder / name.format(kind)).write_text(SOME.format(value))


def test_the_pressure_of_the_machine_is_read_at_most_once_a_second(tmp_path: Path) -> None:
    folder = tmp_path / "proc/pressure"
    _pressure(folder, "{}", cpu=63.4, memory=0.5)
    reader = PressureReader(tmp_path)
    assert reader.poll(10.0) == HostPressure(63.4, 0.5)
    _pressure(folder, "{}", cpu=5.0)
    assert reader.poll(10.9) == HostPressure(63.4, 0.5)
    assert reader.poll(11.0) == HostPressure(5.0, 0.5)
    (folder / "cpu").write_text("")
    assert reader.poll(12.0) == HostPressure(None, 0.5), "not known, which is not 0"


def test_the_pressure_of_the_own_cgroup_comes_first(tmp_path: Path) -> None:
    _pressure(tmp_path / "proc/pressure", "{}", cpu=90.0, io=3.0)
    own = tmp_path / "proc/self"
    own.mkdir()
    (own / "cgroup").write_text("0::/job\n")
    (own / "mountinfo").write_text("38 31 0:38 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")
    _pressure(tmp_path / "sys/fs/cgroup/job", "{}.pressure", cpu=20.0)
    assert PressureReader(tmp_path).poll(0.0) == HostPressure(20.0, None, 3.0)
    # A kernel may have the file and not the figures of a cgroup.
    (tmp_path / "sys/fs/cgroup/job/cpu.pressure").write_text("")
    assert PressureReader(tmp_path).poll(0.0) == HostPressure(90.0, None, 3.0)


def test_a_kernel_without_pressure_gives_none(tmp_path: Path) -> None:
    assert PressureReader(tmp_path).poll(0.0) is None


def test_this_machines_figures_are_percentages() -> None:
    found = PressureReader().poll(0.0)
    known = [] if found is None else [found.cpu, found.memory, found.io]
    assert all(0 <= one <= 100 for one in known if one is not None)
