"""Fault tools: the reverter process, plans for links, damage to stored data."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from ftrun.agent.faults import corruption as corruption
from ftrun.agent.faults import network as network_faults
from ftrun.agent.faults.machine import check_may_be_filled
from ftrun.agent.faults.reverter import RunningFault
from ftrun.agent.faults.reverter_process import named, start_time
from ftrun.errors import FaultRefused
from ftrun.ids import Rank, version
from ftrun.wire.fault_orders import make_order
from ftrun.wire.shared_memory.arena import ArenaShape, create_memfd

WAIT_S = 600.0


def wait_for(is_so: Callable[[], object]) -> None:
    give_up = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < give_up
        time.sleep(0.01)


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.fixture
def sleeper() -> "Iterator[subprocess.Popen[bytes]]":
    process = subprocess.Popen(["sleep", "1000"])
    yield process
    process.kill()
    process.wait()


@contextmanager
def shell_of(words: str) -> "Iterator[subprocess.Popen[bytes]]":
    """A shell with its child processes, which end at the end of the test, also if it fails."""
    shell = subprocess.Popen(["sh", "-c", words], stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        yield shell
    finally:
        with suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)
        shell.wait()


def test_a_reverter_undoes_when_the_time_is_over(tmp_path: Path) -> None:
    path, seen = tmp_path / "fault", tmp_path / "seen"
    # Copied at once: on a busy machine the command may end before this process reads it.
    do = [["write", str(path), "here"], ["run", ["cp", str(path), str(seen)]]]
    active_fault = RunningFault(do, [["unlink", str(path)]], for_s=0.3)
    wait_for(active_fault.is_over)
    assert seen.read_text() == "here"
    assert not path.exists()


def test_a_reverter_undoes_when_requested(tmp_path: Path) -> None:
    path = tmp_path / "fault"
    active_fault = RunningFault([["write", str(path), "here"]], [["unlink", str(path)]])
    active_fault.end()
    assert not path.exists()


def test_a_reverter_undoes_when_all_it_is_about_have_ended(
    tmp_path: Path, sleeper: "subprocess.Popen[bytes]"
) -> None:
    path = tmp_path / "fault"
    active_fault = RunningFault(
        [["write", str(path), "here"]], [["unlink", str(path)]], targets=named(sleeper.pid)
    )
    assert not active_fault.is_over()
    sleeper.kill()
    sleeper.wait()
    wait_for(active_fault.is_over)
    assert not path.exists()


def test_a_step_that_fails_undoes_the_others_and_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "fault"
    do = [["write", str(path), "here"], ["run", ["sh", "-c", "echo no luck >&2; exit 3"]]]
    with pytest.raises(FaultRefused, match="no luck"):
        RunningFault(do, [["unlink", str(path)]])
    assert not path.exists()


def test_what_it_has_not_made_is_not_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "of-somebody-else"
    path.write_text("here")
    for do in (["run", ["sh", "-c", "echo File exists >&2; exit 2"]], ["fill", str(path)]):
        with pytest.raises(FaultRefused, match="File exists"):
            RunningFault([do], [["unlink", str(path)]])
        assert path.read_text() == "here"


def test_a_process_is_stopped_in_turns(sleeper: "subprocess.Popen[bytes]") -> None:
    target = named(sleeper.pid)
    undo = [["signal", signal.SIGCONT, target]]
    active_fault = RunningFault([["beat", 0.5]], undo, targets=target)
    wait_for(lambda: state(sleeper.pid) == "T")
    wait_for(lambda: state(sleeper.pid) == "S")
    active_fault.end()
    wait_for(lambda: state(sleeper.pid) == "S")


def test_a_process_and_its_children_are_ended_together() -> None:
    with shell_of("sleep 1000 & sleep 1000") as shell:
        wait_for(lambda: len(children(shell.pid)) == 2)
        pids = [shell.pid, *children(shell.pid)]
        stop, go = (["tree", one, shell.pid] for one in (signal.SIGSTOP, signal.SIGCONT))
        RunningFault([stop], [go]).end()
        RunningFault([["tree", signal.SIGKILL, shell.pid]], []).end()
        shell.wait()
        wait_for(lambda: not any(start_time(pid) for pid in pids))


def test_healers_take_back_what_they_did_before_all_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "fault"
    order = {"do": [["write", str(path), "here"]], "undo": [["unlink", str(path)]]}
    program = f"{shlex.quote(sys.executable)} -m ftrun.agent.faults.reverter_process"
    reverter = f"{program} '{json.dumps(order)}'"
    # The shell waits for no child, like a busy agent.
    with shell_of(f"(echo go; exec sleep 1000) | {reverter} & exec sleep 1000") as shell:
        wait_for(lambda: path.exists() and path.read_text())
        stop, go = (["tree", one, shell.pid] for one in (signal.SIGSTOP, signal.SIGCONT))
        stopping = RunningFault([stop], [go])
        wait_for(lambda: state(shell.pid) == "T")
        (other,) = [pid for pid in children(shell.pid) if comm(pid) == "ftrun-healer"]
        assert state(other) != "T"
        stopping.end()
        RunningFault([["tree", signal.SIGKILL, shell.pid]], []).end()
        shell.wait()
        assert not path.exists()
        wait_for(lambda: not start_time(other))


def comm(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_an_unknown_peer_with_an_old_number_is_not_touched(
    sleeper: "subprocess.Popen[bytes]",
) -> None:
    (target,) = named(sleeper.pid)
    other = (target[0], target[1] + 1)
    RunningFault([["signal", signal.SIGKILL, [other]]], []).end()
    assert sleeper.poll() is None


# --- links ------------------------------------------------------------------------------------


def answers(
    kind: str, address: str, *qdiscs: dict[str, object]
) -> Callable[..., list[dict[str, object]]]:
    """Replaces the programs ip and tc, which have no such device here."""

    def asked(_program: str, *words: str) -> list[dict[str, object]]:
        if words[0] == "qdisc":
            return [{"kind": "noqueue", "handle": "0:", "root": True}, *qdiscs]
        if words[0] == "address":
            return [{"ifname": "eth7", "addr_info": [{"local": address}]}]
        return [{"ifname": "eth7", "linkinfo": {"info_kind": kind}}]

    return asked


def plan(
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    *qdiscs: dict[str, object],
    device: str = "veth",
    anywhere: bool = True,
) -> network_faults.LinkFault:
    monkeypatch.setattr(network_faults, "_asked", answers(device, "10.1.2.3", *qdiscs))
    monkeypatch.setattr(network_faults, "_has_net_admin", lambda: True)
    monkeypatch.setattr(network_faults.shutil, "which", lambda name: f"/sbin/{name}")
    order = make_order("a", kind)
    return network_faults.link_fault(order, host="10.1.2.3", is_allowed_anywhere=anywhere)


def test_a_cut_drops_both_ways_and_one_way_only_what_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert "ingress" in json.dumps(plan(monkeypatch, "partition").do)
    assert "ingress" not in json.dumps(plan(monkeypatch, "one-way-partition").do)
    for kind in ("partition", "one-way-partition", "lossy-link"):
        found = plan(monkeypatch, kind)
        assert found.undo == [["run", ["/sbin/tc", "qdisc", "delete", "dev", "eth7", "clsact"]]]


def test_what_another_user_has_set_on_a_device_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clsact: dict[str, object] = {"kind": "clsact", "handle": "ffff:", "parent": "ffff:fff1"}
    shaper: dict[str, object] = {"kind": "tbf", "handle": "8001:", "root": True}
    for kind in ("partition", "one-way-partition", "lossy-link"):
        with pytest.raises(FaultRefused, match="clsact already"):
            plan(monkeypatch, kind, clsact)
        plan(monkeypatch, kind, shaper)
    with pytest.raises(FaultRefused, match="tbf already"):
        plan(monkeypatch, "slow-link", shaper)
    assert "tbf" in plan(monkeypatch, "slow-link", clsact).how


def test_a_device_that_is_no_veth_is_never_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FaultRefused, match="veth"):
        plan(monkeypatch, "partition", device="")


def test_the_namespace_of_process_1_is_not_touched_unasked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    same = os.readlink("/proc/self/ns/net")
    monkeypatch.setattr(network_faults.os, "readlink", lambda _: same)
    with pytest.raises(FaultRefused, match="--allow-network-faults"):
        plan(monkeypatch, "partition", anywhere=False)


def test_an_address_that_is_not_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_faults, "_asked", answers("veth", "10.9.9.9"))
    monkeypatch.setattr(network_faults, "_has_net_admin", lambda: True)
    monkeypatch.setattr(network_faults.shutil, "which", lambda name: f"/sbin/{name}")
    with pytest.raises(FaultRefused, match="no device"):
        network_faults.link_fault(
            make_order("a", "partition"), host="10.1.2.3", is_allowed_anywhere=True
        )


# --- file systems -----------------------------------------------------------------------------


def test_only_a_small_file_system_of_its_own_is_filled() -> None:
    shm = Path("/dev/shm")
    found = os.statvfs(shm)
    size_bytes = found.f_blocks * found.f_frsize
    check_may_be_filled(shm, "/dev/shm", size_bytes)
    with pytest.raises(FaultRefused, match=f"{size_bytes >> 20} MiB"):
        check_may_be_filled(shm, "/dev/shm", size_bytes - 1)
    with pytest.raises(FaultRefused, match="file system of /"):
        check_may_be_filled(Path("/"), "the logs", 1 << 60)


# --- damage -----------------------------------------------------------------------------------


def test_one_bit_of_the_newest_checkpoint_flips(tmp_path: Path) -> None:
    folder = tmp_path / "step-7"
    folder.mkdir()
    (folder / "rank-00000.safetensors").write_bytes(bytes(1000))
    (folder / "rank-00001.safetensors").write_bytes(bytes(2000))
    with pytest.raises(FaultRefused, match="no checkpoint"):
        corruption.newest_file(tmp_path)
    (tmp_path / "latest").symlink_to("step-7")
    path = corruption.newest_file(tmp_path)
    assert path.name == "rank-00001.safetensors"
    corruption.flip_in_file(path)
    assert sum(byte.bit_count() for byte in path.read_bytes()) == 1
    assert path.stat().st_size == 2000


def test_without_a_snapshot_nothing_can_be_flipped() -> None:
    fd = create_memfd(ArenaShape(0, 1, 4096, 1, 1))
    with pytest.raises(FaultRefused, match="no snapshot"):
        corruption.newest_common({Rank(0): [fd]}, [0])
    corruption.flip_from({Rank(0): [fd]}, 0, version(0, 0))
    os.close(fd)


def test_without_other_nodes_nothing_is_kept_for_them() -> None:
    with pytest.raises(FaultRefused, match="several nodes"):
        corruption.check_kept([], at_least=1)
