"""The verdict from dumps alone: of NCCL's shape, of real processes with gloo, and of damaged files.

`nccl_world` makes traces of the shapes that recorded incidents had.
"""

import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import typer
from unit.monitor.nccl_world import SIZE, Fault, play, traces

from ftrun.errors import UsageError
from ftrun.tools.explain import dumps
from ftrun.tools.explain.command import explain
from ftrun.tools.explain.dumps import read_folder
from ftrun.tools.explain.views import judge, views_of

PAIRS = [(12, 14), (9, 14), (10, 15)]
"""Ranks with a fault in recorded incidents."""

PREFIX = "nccl_trace_rank_"
SECOND_NS = 10**9


def write(folder: Path, found: Mapping[int, Any], *, prefix: str = PREFIX) -> None:
    folder.mkdir(exist_ok=True)
    for rank, dump in found.items():
        (folder / f"{prefix}{rank}").write_bytes(pickle.dumps(dump, protocol=2))


def explained(
    folder: Path, capsys: pytest.CaptureFixture[str], *, prefix: str | None = None, code: int = 0
) -> Any:
    with pytest.raises(typer.Exit) as ended:
        explain(str(folder), prefix, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert ended.value.exit_code == found["exit_code"] == code
    return found


def shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(typer.Exit):
        explain(str(folder))
    return capsys.readouterr().out


def call(seq: int, *, over: bool, group: str = "0", **changes: Any) -> dict[str, Any]:
    """An entry of NCCL's recorder, called at `seq` seconds."""
    return {
        "pg_id": int(group, 36), "process_group": (group, f"group {group}"),
        "collective_seq_id": seq, "p2p_seq_id": 0, "op_id": seq,
        "profiling_name": "nccl:all_reduce", "time_created_ns": seq * SECOND_NS,
        "input_sizes": [[8]], "retired": over, "state": "completed" if over else "scheduled",
        "time_discovered_completed_ns": None, "is_p2p": False,
    } | changes  # fmt: skip


def dump(*entries: dict[str, Any], groups: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "version": "2.10",
        "pg_config": {
            name: {"name": name, "desc": f"group {name}", "ranks": str(list(ranks))}
            for name, ranks in groups.items()
        },
        "pg_status": {},
        "entries": list(entries),
    } | changes


# --- verdicts ---------------------------------------------------------------------------------


@pytest.mark.parametrize("is_json", [False, True])
@pytest.mark.parametrize("culprits", PAIRS)
def test_hosts_that_have_called_nothing_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], culprits: tuple[int, int], is_json: bool
) -> None:
    faults = dict.fromkeys(culprits, Fault(32, is_of_device=False))
    found = traces(play(6, faults), faults, only_active=True)
    if is_json:
        for rank, one in found.items():
            (tmp_path / f"rank_{rank}.json").write_text(json.dumps(one))
    else:
        write(tmp_path, found)
    answer = explained(tmp_path, capsys)
    verdict = answer["verdict"]
    assert (verdict["kind"], verdict["culprits"]) == ("hang in computation", list(culprits))
    assert set(verdict["victims"]) == set(range(SIZE)) - set(culprits)
    assert verdict["confidence"] == "likely"
    first, second = culprits
    assert verdict["text"].startswith(f"ranks {first} and {second} have made no further call, and ")
    assert f"rank {first}: no call is in its dump" in verdict["evidence"]
    assert "what a rank does outside of its calls is not in a dump" in verdict["counter_evidence"]
    assert answer["next"].startswith(f"look at what ranks {first} and {second} did after")
    assert answer["ranks"] == list(range(SIZE))


@pytest.mark.parametrize("only_active", [False, True])
@pytest.mark.parametrize("culprits", PAIRS)
def test_devices_that_complete_nothing_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], culprits: tuple[int, int], only_active: bool
) -> None:
    faults = dict.fromkeys(culprits, Fault(40, is_of_device=True))
    write(tmp_path, traces(play(6, faults), faults, only_active=only_active))
    answer = explained(tmp_path, capsys)
    verdict = answer["verdict"]
    assert (verdict["kind"], verdict["culprits"]) == ("device stuck", list(culprits))
    assert any(f"and rank {culprits[0]} has only called it" in one for one in verdict["evidence"])
    assert "dmesg" in answer["next"]


def test_a_missing_dump_is_no_fault_if_another_rank_is_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    faults = dict.fromkeys((9, 14), Fault(32, is_of_device=False))
    found = traces(play(6, faults), faults)
    write(tmp_path, {rank: one for rank, one in found.items() if rank != 14})
    answer = explained(tmp_path, capsys)
    assert answer["verdict"]["culprits"] == [9]
    against = answer["verdict"]["counter_evidence"]
    assert any(one.startswith("rank 14 has no dump that can be read") for one in against)
    assert answer["without_dump"] == [14]


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_missing_dump_is_evidence_if_all_others_wait(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], is_damaged: bool
) -> None:
    faults = dict.fromkeys((9, 14), Fault(32, is_of_device=False))
    found = traces(play(6, faults), faults)
    write(tmp_path, {rank: one for rank, one in found.items() if rank not in (9, 14)})
    if is_damaged:
        whole = pickle.dumps(found[9], protocol=2)
        (tmp_path / f"{PREFIX}9").write_bytes(whole[: len(whole) // 2])
    answer = explained(tmp_path, capsys)
    verdict = answer["verdict"]
    assert verdict["culprits"] == [9, 14]
    assert verdict["confidence"] == "possible"
    state = "have a damaged dump or have no dump" if is_damaged else "have no dump"
    assert verdict["text"].startswith(f"ranks 9 and 14 {state}, and ")
    assert answer["next"].startswith("find out whether ranks 9 and 14 ended")
    assert list(answer["damaged"]) == (["9"] if is_damaged else [])
    text = shown(tmp_path, capsys)
    assert "none of ranks 9, 14" in text
    assert ("  damaged" in text) == is_damaged


def test_if_all_have_entered_it_is_the_communication(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank, node in enumerate(("n1", "n2")):
        one = dump(call(1, over=True), call(2, over=False), groups={"0": [0, 1]})
        write(tmp_path / node, {rank: one})
    answer = explained(tmp_path, capsys)
    assert answer["verdict"]["kind"] == "hang in communication"
    assert answer["verdict"]["nodes"] == ["n1", "n2"]
    assert "a connection between nodes n1, n2 carries no data" in answer["verdict"]["text"]
    assert answer["next"] == "check the network between the nodes of ranks 0 and 1"
    # A rank that no other waits for.
    write(tmp_path, {2: dump(groups={"0": [0, 1], "1": [2, 3]})})
    answer = explained(tmp_path, capsys)
    assert answer["verdict"]["kind"] == "hang in communication"
    assert answer["without_dump"] == [3]
    (tmp_path / f"{PREFIX}2").unlink()
    for node in ("n1", "n2"):
        (file,) = (tmp_path / node).iterdir()
        file.rename(tmp_path / file.name)
    answer = explained(tmp_path, capsys)
    assert answer["verdict"]["nodes"] == []
    assert answer["verdict"]["text"].endswith("cannot leave it: a connection carries no data")


def test_another_collective_under_one_number_is_named_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    frames = [
        {"name": "all_reduce", "filename": "/x/torch/distributed/distributed_c10d.py", "line": 9},
        {"name": "step", "filename": "/home/me/train.py", "line": 42},
    ]
    calls = {rank: call(5, over=False, frames=frames) for rank in range(4)}
    calls[2] |= {"profiling_name": "nccl:broadcast"}
    write(tmp_path, {rank: dump(one, groups={"0": range(4)}) for rank, one in calls.items()})
    answer = explained(tmp_path, capsys)
    assert answer["verdict"]["kind"] == "skipped collective"
    assert answer["verdict"]["culprits"] == [2]
    assert answer["verdict"]["confidence"] == "certain"
    last = answer["verdict"]["evidence"][-1]
    assert last.startswith("rank 2: its last call is broadcast #5 of group group 0, ")
    assert "which it had entered at train.py:42 in step " in last
    assert answer["next"].startswith("fix the program")


def test_a_circle_of_groups_is_a_deadlock(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    groups = {"1": [0, 1], "2": [0, 1]}
    write(tmp_path, {
        0: dump(call(1, over=False, group="1"), groups=groups),
        1: dump(call(1, over=False, group="2"), groups=groups),
    })  # fmt: skip
    answer = explained(tmp_path, capsys)
    assert (answer["verdict"]["kind"], answer["verdict"]["culprits"]) == ("deadlock", [0, 1])
    assert "in one order" in answer["next"]


def test_a_collective_that_one_device_has_not_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, {
        rank: dump(call(3, over=False, state=state), groups={"0": [0, 1, 2]})
        for rank, state in enumerate(("started", "scheduled", "started"))
    })  # fmt: skip
    answer = explained(tmp_path, capsys)
    assert (answer["verdict"]["kind"], answer["verdict"]["culprits"]) == ("device stuck", [1])


def test_no_verdict_if_no_rank_waits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    groups = {"0": [0, 1]}
    write(tmp_path, {rank: dump(call(3 + rank, over=True), groups=groups) for rank in range(2)})
    answer = explained(tmp_path, capsys, code=3)
    assert answer["verdict"] is None
    assert answer["next"].startswith("no rank waits in a collective")
    assert shown(tmp_path, capsys).startswith("no rank waits in a collective")


def test_different_collectives_of_the_past_are_a_verdict_too(tmp_path: Path) -> None:
    names = ("nccl:all_reduce", "nccl:barrier", "nccl:all_reduce")
    write(tmp_path, {
        rank: dump(call(3, over=True, profiling_name=name), groups={"0": [0, 1, 2]})
        for rank, name in enumerate(names)
    })  # fmt: skip
    found = read_folder(tmp_path, None)
    traces = {rank: one.trace for rank, one in found.dumps.items()}
    verdict = judge(views_of(traces, dict.fromkeys(traces, 9 * SECOND_NS)), {})
    assert verdict is not None
    assert verdict.culprits == (1,)


def test_with_gloo_a_missing_rank_may_have_ended_the_calls_of_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As after the kill of rank 1, in which rank 2 had left #2 before the others."""
    calls = {0: (2, True), 2: (3, False), 3: (2, True)}
    write(tmp_path, {
        rank: dump(call(seq, over=over, state="scheduled", profiling_name="gloo:all_reduce"),
                   groups={"0": range(4)})
        for rank, (seq, over) in calls.items()
    })  # fmt: skip
    verdict = explained(tmp_path, capsys)["verdict"]
    assert verdict["culprits"] == [0, 3]
    assert verdict["confidence"] == "possible"
    against = "if a rank has ended, calls of gloo on other ranks are over, by an error"
    assert against in verdict["counter_evidence"]


# --- what is known of groups and times --------------------------------------------------------


def numbered(name: str) -> dict[int, Any]:
    """Rank 1 has called nothing of late: only its counts show it, by the number of the group."""
    status = {
        str(number): {"last_enqueued_collective": last, "last_completed_collective": last}
        for number, last in ((4, 9), (7, 5))
    }
    groups = {"0": [0, 1], name: [0, 1]}
    other = call(6, over=False, group=name, pg_id=7)
    return {0: dump(other, groups=groups), 1: dump(groups=groups, pg_status=status)}


def test_counts_are_matched_with_groups_by_their_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, numbered("12"))
    verdict = explained(tmp_path, capsys)["verdict"]
    assert (verdict["culprits"], verdict["confidence"]) == ([1], "likely")
    assert "rank 1 entered only #5 of that group" in verdict["evidence"]


def test_counts_whose_group_is_not_known_prove_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = numbered("hash")
    found[0]["entries"][0]["pg_id"] = 7
    write(tmp_path, found)
    verdict = explained(tmp_path, capsys)["verdict"]
    assert verdict["culprits"] == []
    assert "whether rank 1 entered all_reduce #6" in verdict["text"]


def test_an_entry_that_contradicts_the_order_is_believed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = numbered("12")
    found[1]["entries"] = [call(5, over=True, group="12", pg_id=4)]
    write(tmp_path, found)
    verdict = explained(tmp_path, capsys)["verdict"]
    assert (verdict["kind"], verdict["culprits"]) == ("device stuck", [0]), "#9 is over on rank 1"


def test_waits_are_counted_up_to_the_change_of_a_file_unless_it_is_a_copy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    groups = {"0": [0, 1], "1": [0, 1], "bad": "?"}
    write(tmp_path, {
        0: dump(call(2, over=True), call(3, over=False), groups=groups),
        1: dump(call(2, over=True), groups=groups),
    })  # fmt: skip
    copied = explained(tmp_path, capsys)["verdict"]
    assert "rank 0 has entered all_reduce #3 of group group 0 and not left it for 0.0 s" in copied[
        "evidence"
    ]  # fmt: skip
    assert any("the files are copies" in one for one in copied["counter_evidence"])
    for at_s, is_short in ((63, False), (8, True)):
        for rank in range(2):
            os.utime(tmp_path / f"{PREFIX}{rank}", (at_s, at_s))
        verdict = explained(tmp_path, capsys)["verdict"]
        assert any(f"not left it for {at_s - 3}.0 s" in one for one in verdict["evidence"])
        assert [one for one in verdict["counter_evidence"] if "longest wait" in one] == (
            ["the longest wait is 5.0 s: the ranks may have made progress"] if is_short else []
        )


# --- files ------------------------------------------------------------------------------------


def test_the_screen_shows_each_field_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    faults = {9: Fault(32, is_of_device=False)}
    write(tmp_path, traces(play(6, faults), faults))
    lines = shown(tmp_path, capsys).splitlines()
    assert lines[0].startswith("rank 9 has made no further call, and 15 ranks wait in ")
    names = [line[2:12].strip() for line in lines[1:] if line[2:12].strip()]
    assert names == ["kind", "evidence", "against", "sure", "next", "read"]
    assert lines[-1].endswith("16 dumps of 16 ranks, format 2.10")


def test_dumps_of_two_runs_are_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    healthy = dump(call(3, over=True), groups={"0": [0]})
    write(tmp_path, {0: healthy}, prefix="old_")
    write(tmp_path, {0: healthy, 1: healthy}, prefix="new_")
    (tmp_path / "loss.17").write_text("no dump: its prefix has none")
    with pytest.raises(UsageError, match=r"2 prefixes: new_ \(2\), old_ \(1\). Choose one"):
        read_folder(tmp_path, None)
    assert explained(tmp_path, capsys, prefix="new_", code=3)["ranks"] == [0, 1]
    with pytest.raises(UsageError, match="ends in a rank, such as other_3"):
        read_folder(tmp_path, "other_")
    write(tmp_path / "n2", {1: healthy}, prefix="new_")
    with pytest.raises(UsageError, match="two dumps of rank 1: "):
        read_folder(tmp_path, "new_")


def test_a_folder_without_dumps_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is no folder"):
        read_folder(tmp_path / "missing", None)
    (tmp_path / "train.log").touch()
    (tmp_path / f".{PREFIX}3").touch()  # ftrun writes a dump under such a name first
    with pytest.raises(UsageError, match=r"has no dumps: .* nccl_trace_rank_3.* --help"):
        read_folder(tmp_path, None)
    (tmp_path / "step_100").write_text("{}")
    with pytest.raises(UsageError, match=r"none of 1 files .*step_100: it is no dump of a"):
        read_folder(tmp_path, None)


@pytest.mark.parametrize("version", ["1.5", "3.0", "2", "2.10.1"])
def test_a_format_that_is_not_known_is_refused(tmp_path: Path, version: str) -> None:
    write(tmp_path, {0: dump(groups={}, version=version)})
    with pytest.raises(UsageError, match=f"has format '{version}'. Known are formats 2.x"):
        read_folder(tmp_path, None)


class _Named:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, ("touch harmful",)


class _Persistent(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        return "outside" if value == "refer" else None


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("names os.system", "it names posix.system, which is not plain data"),
        ("refers", "it refers to an object outside of it"),
        ("torn", "pickle data was truncated"),
        ("empty", "it is damaged"),
        ("no dump", "it is no dump of a flight recorder"),
        ("other entries", "its entries have another form"),
        ("too large", r"it has [\d,]+ bytes, and at most 8 are read"),
        ("calls a number", "it is damaged"),
    ],
)
def test_a_dump_that_is_more_than_plain_values_is_refused(
    tmp_path: Path, kind: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "rank_0"
    value: Any = dump(groups={})
    if kind == "names os.system":
        value["entries"] = _Named()
    if kind == "other entries":
        value["entries"] = [{"state": 5}]
    path.write_bytes(
        pickle.dumps([1] if kind == "no dump" else value)[: 9 if kind == "torn" else None]
    )
    if kind == "refers":
        with path.open("wb") as file:
            _Persistent(file).dump({"entries": "refer"})
    if kind in ("empty", "calls a number"):
        path.write_bytes(b"\x80\x02K\x01)R." if kind == "calls a number" else b"")
    if kind == "too large":
        monkeypatch.setattr(dumps, "MAX_DUMP_BYTES", 8)
    with pytest.raises(ValueError, match=reason):
        dumps.read_dump(path)
    assert not (tmp_path / "harmful").exists()


# --- real processes ---------------------------------------------------------------------------

CALLS = """
import os, pickle, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace

rank, folder = int(sys.argv[1]), Path(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)

def step():
    dist.all_reduce(torch.ones(4))

step()
while not pickle.loads(_dump_fr_trace(True, False, False))["entries"][0]["retired"]:
    time.sleep(0.01)
work = dist.all_reduce(torch.ones(8), async_op=True) if rank == 0 else None
part = folder / f".trace_{rank}"
part.write_bytes(_dump_fr_trace(True, True, False))
part.rename(folder / f"trace_{rank}")
while len(list(folder.glob("trace_*"))) < 2:
    time.sleep(0.01)
os._exit(0)
"""


def test_pickles_of_torch_from_processes_without_ftrun(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(CALLS)
    command = [sys.executable, "-W", "ignore", str(script)]
    ranks = [subprocess.Popen([*command, str(rank), str(tmp_path)]) for rank in range(2)]
    give_up_s = time.monotonic() + 120
    try:
        for one in ranks:
            assert one.wait(max(1.0, give_up_s - time.monotonic())) == 0
    finally:
        for one in ranks:
            one.kill()
            one.wait()
    verdict = explained(tmp_path, capsys)["verdict"]
    assert verdict["text"] == (
        "rank 1 has made no further call, and rank 0 waits in all_reduce #2 of the default group"
    )
    (last,) = [one for one in verdict["evidence"] if "its last call is" in one]
    assert last.startswith("rank 1: its last call is all_reduce #1 of the default group, ")
    assert "which it had entered at train.py:11 in step " in last
    os.unlink(tmp_path / "trace_1")
    verdict = explained(tmp_path, capsys)["verdict"]
    assert verdict["text"].startswith("rank 1 has no dump, and rank 0 waits in all_reduce #2")
