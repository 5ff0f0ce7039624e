"""Ranks of a node park on request; all others end, with what they have started."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from ftrun.agent.launch.parking import NCCL_ERRORS, report_nccl_errors, survivor_variables
from ftrun.agent.launch.rank_trees import _ORPHANS_WAIT_S, KILL_WAIT_S
from ftrun.config.cluster import MembershipSettings
from ftrun.config.profile import RestartConfig

WAIT_S = 120.0

SETUP = """
import json, os, signal, socket, subprocess, sys, time
from pathlib import Path
import msgspec
from ftrun import process_tree
from ftrun.agent.launch.process import spawn
from ftrun.agent.launch.warm_start import LaunchSlot, WorkerHandle, WorkerStarter
from ftrun.agent.launch.worker_group import WorkerGroup
from ftrun.agent.launch.parking import parked_ranks
from ftrun.agent.snapshots.smp_client import AgentSmpClient
from ftrun.config.profile import Profile, RestartConfig
from ftrun.config.run_spec import RunSpec
from ftrun.ids import version
from ftrun.journal import Journal
from ftrun.linux import become_subreaper
from ftrun.wire.cluster.generation import GenerationPlan, NodeCard, PlanMember
from ftrun.wire.cluster.membership import ParkedRank
from ftrun.wire.messages.worker import LaunchRequest, decode_launch, encode_launch
from ftrun.wire.run_environment import RunFolder
from ftrun.wire.shared_memory.pages import HeartbeatField, SharedPage

RANK = '''
import json, os, socket, sys
line = socket.socket(fileno=int(sys.argv[1]))
revoked = json.loads(line.recv(4096))
assert revoked == {"type": "Revoke", "generation": 4}, revoked
answer = {"type": "Parked", "generation": 4, "first_step": 7, "renewals": 2,
          "last_step": 30}
DO_THIS
line.send(json.dumps(answer).encode())
data, fds, _, _ = socket.recv_fds(line, 4096, 16)
memory = open(fds[0])
memory.seek(0)
request = memory.read()
out = dict(zip(json.loads(request)["descriptors"], fds[1:]))["stdout"]
os.write(out, request.encode() + b"\\\\n")
line.recv(1)
'''

def group_of(*ranks, park_s=1.0, may_stay=True):
    become_subreaper()
    restart = RestartConfig(survivors="on", park_s=park_s)
    spec = RunSpec(run_id="r", script="s", torchrun_argv=[], log_folder=".", cwd=".",
                   profile=Profile(restart=restart))
    smp = AgentSmpClient(RunFolder(Path(".")), 1.0)
    group = WorkerGroup(spec, smp=smp, starter=WorkerStarter(None, Journal(Path("."))))
    prepare(group, 4, len(ranks))
    for local, code in enumerate(ranks):
        slot = group.starter.slots[local]
        slot.page.set(HeartbeatField.MAY_STAY, int(may_stay))
        slot.page.set(HeartbeatField.FIRST_STEP_NS, 1)
        fds = slot.request.descriptors
        words = [sys.executable, "-c", RANK.replace("DO_THIS", code), str(fds["line"])]
        variables = {**os.environ, "FTRUN_LAUNCH": encode_launch(slot.request).decode()}
        child = spawn(words, name="rank", variables=variables, pass_fds=list(fds.values()),
                      new_session=True)
        group.starter.handles[local] = WorkerHandle(local, child, slot, "fresh")
    group._close_given()
    return group

def prepare(group, generation, num_ranks, joins=False):
    request = LaunchRequest(generation, -1, num_ranks, os.getpid(), "", joins=joins)
    group.prepare(request, range(num_ranks), kept=None, rails={})

def next_plan(*staying):
    # node a runs the first ranks of generation 5, node b the others, and c is a spare
    a, b, c = (NodeCard(name, 1, name, 1, 10) for name in "abc")
    members = [PlanMember(a, 0), PlanMember(b, 10)]
    return GenerationPlan(5, "a", "", members, [c], None, "", "a", 1, staying=list(staying))

def until(is_so):
    give_up_s = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < give_up_s
        time.sleep(0.01)

def start(group, local, out):
    starter = group.starter
    env = {"MASTER_PORT": "77", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}  # as torch's launcher
    return starter(sys.executable, ["-u", "train.py"], env, out, out, local)
"""

ALL_KINDS = """
daemon = "os.system('setsid sleep 600 > log 2>&1 & echo $! > daemon{0}')"
group = group_of(
    daemon.format(0),  # it parks
    "os._exit(3)",
    daemon.format(2) + "; import time; time.sleep(600)",  # it is late
    "answer['problem'] = 'a batch was changed'",
    daemon.format(4),  # it is at fault
)
page = group.starter.slots[0].page
names = [Path(f"daemon{rank}") for rank in (0, 2)]
began_s = time.monotonic()
parking = group.park(failed=(4,))
assert time.monotonic() - began_s < 20
assert [handle.child.status for handle in group.handles] == [None, 3, -9, -9, -9]
assert parked_ranks(group.handles) == (ParkedRank(0, 7, 2, 30),)
assert (parking.generation, parking.problem) == (4, "")
assert sorted(parking.notes) == [
    "rank 2 cannot stay: it has not parked within 1.0 s",
    "rank 3 cannot stay: a batch was changed",
], parking.notes
stays, ended = (int(name.read_text()) for name in names)
assert process_tree.state_of(ended) in ("", "Z"), "what a killed rank has started"
assert process_tree.state_of(stays) == "S", "what a parked rank has started continues"
assert not Path("daemon4").exists(), "it was not asked"

again = group.park(failed=())
assert parked_ranks(group.handles) == (ParkedRank(0, 7, 2, 30),), "another ballot"
group.suspend(True)
assert process_tree.state_of(group.pids()[0]) == "S", "a parked rank makes no step"
group.suspend(False)

(old,) = group.parked
assert (old.poll(), old.wait(), old.state) == (0, 0, "parked"), "torch does not end it"
group.keep_parked(next_plan(0), "a")
prepare(group, 5, 5, joins=True)
joins = [slot.request.joins for slot in group.slots]
assert joins == [False, True, True, True, True], joins
assert ["line" in slot.request.descriptors for slot in group.slots] == joins
handle = start(group, 0, "out")
assert (handle.start, handle.pid, handle.state) == ("stayed", old.pid, "starting")
until(lambda: Path("out").exists() and Path("out").read_text().endswith("\\n"))
request = decode_launch(Path("out").read_text())
assert (request.generation, request.start, request.joins) == (5, "stayed", False)
assert request.variables["MASTER_PORT"] == "77"
assert request.variables["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0", "NCCL ends no rank"
assert {"heartbeat", "command", "stack", "stdout", "stderr"} <= request.descriptors.keys()
group.kill()
assert handle.child.status == -9
assert process_tree.state_of(stays) in ("", "Z")
print("clean")
"""

UNNAMED = """
group = group_of("pass", "pass", "os._exit(1)")
group.park(failed=())
assert len(group.parked) == 2
group.keep_parked(next_plan(1), "a")
assert [handle.child.status for handle in group.handles[:2]] == [-9, None]
prepare(group, 5, 3, joins=True)
(kept,) = group.starter.parked.values()
group.kill()
assert kept.child.status == -9, "another ballot, before it was started"
assert group.starter.parked == {}
print("clean")
"""

OF_ANOTHER_NODE = """
for node_id in "bc":  # another node has parked these ranks in a later generation
    group = group_of("pass", "pass")
    group.park(failed=())
    group.keep_parked(next_plan(0, 1), node_id)
    assert [handle.child.status for handle in group.handles] == [-9, -9]
    assert group.starter.parked == {}
print("clean")
"""

ENDS_BEFORE_ITS_START = """
group = group_of("pass", "os._exit(1)")
group.park(failed=())
(old,) = group.parked
old.child.signal(signal.SIGKILL)
assert old.child.wait(60)
group.keep_parked(next_plan(0), "a")
prepare(group, 5, 2, joins=True)
handle = start(group, 0, "out")
assert group.ended() == [handle], "the generation fails as by any death of a rank"
group.kill()
print("clean")
"""

NONE_HAS_STEPPED = """
group = group_of("pass", "pass")
group.starter.slots[1].page.set(HeartbeatField.FIRST_STEP_NS, 0)
parking = group.park(failed=())
assert parking.problem == "rank 1 has made no step in generation 4"
assert [handle.child.status for handle in group.handles] == [-9, -9]
print("clean")
"""

NOT_GUARDED = """
group = group_of("pass", "pass", may_stay=False)
began_s = time.monotonic()
parking = group.park(failed=())
assert time.monotonic() - began_s < 0.9, "no answer is awaited"
assert (parking.problem, parking.notes) == ("", [])
assert [handle.child.status for handle in group.handles] == [-9, -9]
print("clean")
"""

STOPPED = """
group = group_of("pass", "pass", park_s=8.0)
group.suspend(True)  # it receives nothing from its leader
for handle in group.handles:
    until(handle.child.is_stopped)
group.handles[1].child.signal(signal.SIGKILL)
assert group.handles[1].child.wait(60)
group.park(failed=())
assert len(group.parked) == 1, "it was resumed with an expired lease, and parks"
group.kill()
print("clean")
"""


CASES = [
    *(ALL_KINDS, UNNAMED, OF_ANOTHER_NODE, ENDS_BEFORE_ITS_START),
    *(NONE_HAS_STEPPED, NOT_GUARDED, STOPPED),
]


def test_ranks_park_or_end(tmp_path: Path) -> None:
    """All cases in one process, because its imports take longer than they do."""
    with (tmp_path / "printed").open("w+") as printed:  # a process that is left holds no pipe
        subprocess.run(
            [sys.executable, "-c", "\n".join([SETUP, *CASES])],
            cwd=tmp_path,
            stdout=printed,
            stderr=subprocess.STDOUT,
            check=False,
            timeout=WAIT_S,
        )
        printed.seek(0)
        text = printed.read()
    assert text.count("clean\n") == len(CASES), text


def test_nccl_ends_no_rank_that_may_stay_unless_the_user_has_decided() -> None:
    assert survivor_variables({}, survivors="on") == {NCCL_ERRORS: "0"}
    assert survivor_variables({}, survivors="off") == {}
    assert survivor_variables({NCCL_ERRORS: "1"}, survivors="on") == {}


@pytest.mark.parametrize(("user", "level", "words"), [
    ({}, "INFO", "--survivors on sets TORCH_NCCL_ASYNC_ERROR_HANDLING=0"),
    ({NCCL_ERRORS: "2"}, "", ""),
    ({NCCL_ERRORS: "3"}, "WARNING", "TORCH_NCCL_ASYNC_ERROR_HANDLING=3 lets NCCL end ranks"),
])  # fmt: skip
def test_what_nccl_does_is_said_at_the_start(
    user: dict[str, str], level: str, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        report_nccl_errors(user)
    assert [one.levelname for one in caplog.records] == ([level] if level else [])
    assert words in caplog.text


def test_a_node_answers_a_ballot_in_time_with_the_longest_wait_for_its_ranks() -> None:
    longest_s = 8.0
    assert msgspec.convert({"park_s": longest_s}, RestartConfig).park_s == longest_s
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"park_s": longest_s + 0.1}, RestartConfig)
    assert longest_s + KILL_WAIT_S + _ORPHANS_WAIT_S < MembershipSettings().answer_s
