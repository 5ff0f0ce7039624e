"""A node's check of itself, with real measurements; a fake driver has the GPUs."""

import resource
import shlex
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from ftrun.agent.observe.devices import device_health
from ftrun.agent.observe.node_check import NodeCheck
from ftrun.agent.observe.preflight import (
    clock_fault,
    copy_rate,
    enough_chunks,
    loopback,
    measure,
    room,
)
from ftrun.config.cluster import NodesSpec
from ftrun.config.profile import Profile
from ftrun.config.run_spec import RunSpec
from ftrun.journal import Journal
from ftrun.linux import cgroup_limit_left
from ftrun.membership.events import NodeChecked
from ftrun.monitor.node_fitness import CheckOutcome, NodeFitness, NodeMeasurements
from ftrun.records.decode import decode
from ftrun.records.membership import PreflightFinished
from ftrun.wire.transport.handshake import PeerIdentity

WAIT_S = 600.0
ME = PeerIdentity(run_id="r", purpose="agent", node_id="b", incarnation=1)


def test_a_machine_is_measured(tmp_path: Path) -> None:
    found = measure(tmp_path / "not" / "yet")
    assert found.memory_bytes_per_s > 0
    assert found.loopback_bytes_per_s > 0
    assert 0 < found.loopback_rtt_s < 1
    assert found.free_memory_bytes > 0
    assert found.free_disk_bytes > 0
    assert found.open_files == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert found.clock == ""
    assert found.took_s > 0


def test_the_program_reports_the_limits_of_its_own_process(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "ftrun.agent.observe.preflight", str(tmp_path)]
    command = f"ulimit -n 77; exec {shlex.join(words)}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, check=True, timeout=WAIT_S)
    assert msgspec.json.decode(done.stdout, type=NodeMeasurements).open_files == 77


def test_only_the_free_space_is_read_if_time_is_short(tmp_path: Path) -> None:
    found = room(tmp_path)
    assert found.free_memory_bytes > 0
    assert found.memory_bytes_per_s == 0.0


def test_where_little_memory_is_free_little_of_it_is_taken() -> None:
    assert copy_rate(0) == 0.0
    assert copy_rate(64 << 20) > 0


def test_loopback_and_clock_are_there() -> None:
    rtt_s, rate = loopback()
    assert rtt_s > 0
    assert rate > 0
    assert clock_fault() == ""


@pytest.mark.parametrize(
    ("count", "passed_s", "is_enough"),
    [
        (0, 9.0, False),  # no measurement yet
        (1, 0.33, False),  # other processes used the processor once
        (7, 0.7, False),
        (1, 0.9, True),  # it is slow, and a start waits
        (8, 0.2, False),
        (8, 0.31, True),
        (64, 0.02, True),
    ],
)
def test_a_rate_of_the_loopback_rests_on_some_chunks(
    count: int, passed_s: float, is_enough: bool
) -> None:
    assert enough_chunks(count, passed_s) is is_enough


@pytest.mark.parametrize("controller", ["memory", "pids"])
def test_a_cgroup_sets_no_limit_or_one_that_leaves_something(controller: str) -> None:
    found = cgroup_limit_left(controller)
    assert found is None or found >= 0


def test_without_gpus_nothing_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert device_health() == (0, (), ())


# --- rpc --------------------------------------------------------------------------------------


def node_check_of(
    folder: Path, *, nodes: bool = True, allow_faults: bool = False, **keys: object
) -> NodeCheck:
    about = NodesSpec(
        min_nodes=2, max_nodes=2, endpoint_host="127.0.0.1", endpoint_port=29400, node_id="b"
    )
    profile = msgspec.convert({"preflight": keys}, Profile)
    spec = RunSpec(
        run_id="r",
        script="/t.py",
        torchrun_argv=["t.py"],
        log_folder=str(folder),
        cwd=str(folder),
        profile=profile,
        nodes=about if nodes else None,
        allow_faults=allow_faults,
    )
    return NodeCheck(spec, Journal(folder))


def checks(folder: Path) -> list[NodeFitness]:
    lines = map(decode, (folder / "journal.jsonl").read_bytes().splitlines())
    records = [line.record for line in lines if line is not None]
    return [one.fitness for one in records if isinstance(one, PreflightFinished)]


def test_a_node_of_several_is_checked_whole_and_reported(tmp_path: Path) -> None:
    node_check, reported = node_check_of(tmp_path, timeout_s=60.0), list[NodeChecked]()
    node_check.begin(is_awaited=False)
    node_check.first()
    node_check.join(ME, None, reported.append)
    assert [one.fitness for one in reported] == [node_check.fitness]
    assert node_check.fitness is not None
    assert node_check.fitness.is_whole
    assert node_check.fitness.figures.memory_bytes_per_s > 0
    assert checks(tmp_path) == [node_check.fitness]
    node_check.close()


@pytest.mark.parametrize(("nodes", "is_awaited"), [(False, False), (True, True)])
def test_a_node_that_is_alone_or_awaited_reads_only_the_room(
    tmp_path: Path, nodes: bool, is_awaited: bool
) -> None:
    node_check = node_check_of(tmp_path, nodes=nodes)
    node_check.begin(is_awaited=is_awaited)
    node_check.first()
    assert node_check.fitness is not None
    assert not node_check.fitness.is_whole
    assert node_check.fitness.figures.memory_bytes_per_s == 0.0
    node_check.close()


def test_no_check_is_made_where_none_is_wanted(tmp_path: Path) -> None:
    node_check = node_check_of(tmp_path, enabled=False)
    node_check.begin(is_awaited=False)
    node_check.first()
    assert node_check.fitness is None
    assert checks(tmp_path) == []
    node_check.close()


def test_a_check_that_hangs_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    monkeypatch.setattr("ftrun.agent.observe.node_check.python_command", lambda *_: asleep)
    node_check = node_check_of(tmp_path, timeout_s=0.1)
    node_check.begin(is_awaited=False)
    node_check.first()
    assert node_check.fitness is not None
    assert node_check.fitness.outcome is CheckOutcome.WARN
    assert str(node_check.fitness) == "the check was not done within 0.1 s"
    assert node_check.fitness.figures.free_memory_bytes > 0
    node_check.close()


def test_an_unfit_node_checks_itself_until_it_is_fit(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
    try:
        node_check, reported = (
            node_check_of(tmp_path, timeout_s=60.0, min_open_files=soft, retry_max_s=0.05),
            [],
        )
        node_check.begin(is_awaited=False)
        node_check.first()
        node_check.join(ME, None, reported.append)
        assert not reported[0].fitness.is_fit
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    give_up_s = time.monotonic() + WAIT_S
    while not reported[-1].fitness.is_fit and time.monotonic() < give_up_s:
        time.sleep(0.01)
    assert reported[-1].fitness.is_fit
    assert reported[-1].fitness.number > 1
    node_check.close()


def test_a_check_that_is_wanted_again_has_that_number(tmp_path: Path) -> None:
    node_check, reported = node_check_of(tmp_path, timeout_s=60.0), list[NodeChecked]()
    node_check.begin(is_awaited=True)
    node_check.first()
    node_check.join(ME, None, reported.append)
    node_check.again(5)
    give_up_s = time.monotonic() + WAIT_S
    while reported[-1].fitness.number < 5 and time.monotonic() < give_up_s:
        time.sleep(0.01)
    assert (reported[-1].fitness.number, reported[-1].fitness.is_whole) == (5, True)
    node_check.close()


def test_a_link_that_cannot_be_measured_is_reported_and_no_failure(tmp_path: Path) -> None:
    node_check, reported = node_check_of(tmp_path, timeout_s=60.0), list[NodeChecked]()
    node_check.begin(is_awaited=False)
    node_check.first()
    node_check.join(ME, None, reported.append)
    node_check.dialled("a", "127.0.0.1", 9)
    assert reported[-1].fitness.outcome is CheckOutcome.WARN
    assert reported[-1].fitness.warnings[0].startswith("the link to a was not measured: ")
    before = len(reported)
    node_check.dialled("c", "127.0.0.1", 9)
    assert len(reported) == before
    node_check.close()
