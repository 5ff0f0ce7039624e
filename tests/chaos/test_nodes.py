"""Nodes die, freeze, are cut off and return, and the result is that of an undisturbed run.

Real agents, ranks and networks, on a virtual cluster. Some faults run always. The rest
of the catalogue, which is in scripts/drill_faults.py, runs with scripts/test --full.
"""

import os
import secrets
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import drill_faults
import pytest
from bench_common import ROOT, Deadline
from drill_faults import FAULTS
from drill_nodes import KINDS, STEPS, BaselineRuns, drill, job_argv
from nodes_run import NodesRun
from virtual_cluster import VirtualCluster, available

from ftrun.smp.checkpoint.index import FORMAT, SHARED_FORMAT, parse_index
from ftrun.tools.drill.jobs import DrillJob, difference, outcome_of
from ftrun.wire.messages.checkpoint import INDEX_NAME
from tests.kernel_hang import kernel_hang

if reason := available():
    pytest.skip(f"needs namespaces: {reason}", allow_module_level=True)

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(900)]

WAIT_S = 600.0
NO_ZYGOTE = ("--set", "start.mode=fresh")
"""A run that never starts a rank, so that its timeouts are short."""

ALWAYS = [("lead-power-off", "fsdp2")]
LOADED = 3.0
"""Factor on limits that hold for an idle machine."""
LEAVES = ("drained", "ddp")
CLOCK_STEP_S = 7200
IN_FULL = [
    (name, kind) for name in FAULTS for kind in KINDS if (name, kind) not in (*ALWAYS, LEAVES)
]

Start = Callable[..., NodesRun]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> BaselineRuns:
    return BaselineRuns(tmp_path_factory.mktemp("undisturbed"))


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Start]:
    """A run with this number of members, not started yet, on a cluster with nodes to spare."""
    clusters = []

    def make(
        members: int,
        *flags: object,
        others: int = 0,
        spares: int = 0,
        words: Sequence[object] = (),
        clock_step_s: int = 0,
    ) -> NodesRun:
        clusters.append(cluster := VirtualCluster(members + others, clock_step_s=clock_step_s))
        cluster.up()
        words = words or job_argv("ddp", tmp_path)
        limit = Deadline(WAIT_S)
        return NodesRun(
            cluster, tmp_path, words, limit, members=members, spares=spares, flags=flags
        )

    yield make
    for cluster in clusters:
        cluster.down()


def secret_file(folder: Path, name: str) -> Path:
    path = folder / name
    path.write_bytes(secrets.token_bytes(32))
    path.chmod(0o600)
    return path


def undisturbed_end(undisturbed: BaselineRuns, kind: str, ranks: int) -> tuple[Any, Any]:
    """The names of the ranks' notes, and their outcome without a fault."""
    names = tuple(f"rank{rank}.jsonl" for rank in range(ranks))
    job = DrillJob(kind, tuple(job_argv(kind, Path("FOLDER"))), names, STEPS)
    return names, undisturbed.of(job, ranks)


@pytest.mark.parametrize(("name", "kind"), ALWAYS)
def test_fault_changes_no_byte(
    name: str,
    kind: str,
    tmp_path: Path,
    undisturbed: BaselineRuns,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(drill_faults, "NAMED_S", LOADED * drill_faults.NAMED_S)
    row = drill(FAULTS[name], kind, tmp_path, undisturbed)
    assert row.equal, row.problem


def test_a_node_that_gets_sigterm_costs_no_step_and_a_short_pause(
    tmp_path: Path, undisturbed: BaselineRuns
) -> None:
    name, kind = LEAVES
    row = drill(FAULTS[name], kind, tmp_path, undisturbed)
    assert row.equal, row.problem
    assert (row.steps_lost, row.recoveries) == (0, 1)
    assert row.seconds is not None
    assert row.seconds < LOADED * FAULTS[name].most_s


SURVIVORS = ("--survivors", "on")
WITH_SURVIVORS = ["rank-kill", "lead-power-off", "recovery", "two-at-once", "flap", "agent-stopped"]


@pytest.mark.full
@pytest.mark.parametrize("name", WITH_SURVIVORS)
def test_fault_changes_no_byte_where_ranks_may_stay(
    name: str, tmp_path: Path, undisturbed: BaselineRuns
) -> None:
    fault = FAULTS[name]
    row = drill(replace(fault, flags=(*fault.flags, *SURVIVORS)), "ddp", tmp_path, undisturbed)
    assert row.equal, row.problem


@pytest.mark.full
def test_the_ranks_of_other_nodes_stay_when_a_node_is_lost(
    nodes: Start, tmp_path: Path, undisturbed: BaselineRuns
) -> None:
    names, expected = undisturbed_end(undisturbed, "ddp", 2)
    run = nodes(2, *SURVIVORS, others=1, spares=1)
    run.start_all()
    run.wait_for_step(STEPS // 4 + 4)  # in the middle of a pass, out of which no rank goes back
    lost = run.node_of(1)
    stays = run.node_of(0)
    run.fault("kill", lost)
    run.may_end(lost)
    run.finish()
    assert not difference(expected, [outcome_of(tmp_path / name) for name in names])
    first, second = run.journal(stays, "generation_started")
    assert (second["staying"], second["pids"]) == ([0], first["pids"])


def test_clocks_that_differ_by_hours_change_nothing(
    nodes: Start, tmp_path: Path, undisturbed: BaselineRuns
) -> None:
    """A node of two members is lost and replaced; all monotonic clocks are hours apart."""
    names, expected = undisturbed_end(undisturbed, "ddp", 2)
    run = nodes(2, others=1, spares=1, clock_step_s=CLOCK_STEP_S)
    run.start_all()
    run.wait_for_step(STEPS // 4)
    clocks = [float(line["monotonic_s"]) for line in run.journals("agent_started")]
    assert max(clocks) - min(clocks) > 1.9 * CLOCK_STEP_S
    lost = run.node_of(1)
    run.fault("kill", lost)
    run.may_end(lost)
    run.finish()
    assert not difference(expected, [outcome_of(tmp_path / name) for name in names])
    assert {line["verdict"]["kind"] for line in run.journals("verdict")} == {"node lost"}
    for line in run.journals("recovered"):
        assert 0 <= sum(line["phases_s"].values()) < LOADED * 30, line


def test_a_lost_node_is_restored_from_its_peers_although_no_storage_can_be_read(
    nodes: Start, tmp_path: Path, undisturbed: BaselineRuns
) -> None:
    names, expected = undisturbed_end(undisturbed, "fsdp2", 2)
    saved, away = tmp_path / "saved", tmp_path / "away"
    flags = ("--erasure", "1+1", "--checkpoint-dir", saved, "--checkpoint-every", 0.3)
    run = nodes(2, *flags, others=1, spares=1, words=job_argv("fsdp2", tmp_path))
    run.start_all()
    run.wait_for("a checkpoint", lambda: run.journals("checkpoint_written"))
    saved.rename(away)
    saved.write_text("every access to a file below it fails")
    lost = run.node_of(1)
    run.fault("kill", lost)
    run.may_end(lost)
    run.wait_for_generation(1)
    run.wait_for_more_steps(3)
    saved.unlink()
    away.rename(saved)
    run.finish()
    assert not difference(expected, [outcome_of(tmp_path / name) for name in names])
    chosen = [line for line in run.journals("restore_point_chosen") if line["version"]]
    assert chosen
    assert all(line["reason"].endswith("every rank can be restored") for line in chosen), chosen


@pytest.mark.full  # test_url_nodes.py resumes from a checkpoint, too
def test_lost_node_without_protection_costs_the_steps_since_the_newest_whole_checkpoint(
    nodes: Start, tmp_path: Path, undisturbed: BaselineRuns
) -> None:
    """The newest checkpoint is damaged in the shard of the node that replaces the lost one.

    All nodes fall back to the checkpoint before it, report that, and end as if undisturbed.
    """
    ranks = range(2)
    names = tuple(f"rank{rank}.jsonl" for rank in ranks)
    expected = undisturbed.of(
        DrillJob("fsdp2", tuple(job_argv("fsdp2", Path("FOLDER"))), names, STEPS), 2
    )
    saved = tmp_path / "saved"
    flags = ("--erasure", "none", "--checkpoint-dir", saved, "--checkpoint-every", 0.5)
    run = nodes(2, *flags, others=1, spares=1, words=job_argv("fsdp2", tmp_path))
    run.start_all()
    written = "checkpoint_written"
    run.wait_for("checkpoints", lambda: len({one["step"] for one in run.journals(written)}) >= 3)
    lost = run.node_of(1)
    run.fault("kill", lost)
    run.may_end(lost)
    newest = (saved / "latest").resolve()
    (older,) = [one for one in saved.glob("step-*") if one != newest]
    damaged = newest / "rank-00001.safetensors"
    image = bytearray(damaged.read_bytes())
    image[len(image) // 2] ^= 4
    damaged.write_bytes(image)
    started = [reader.of("attached") for reader in run.readers]
    run.wait_for(
        "a second beginning",
        lambda: all(len(reader.of("attached")) > len(one)
                    for reader, one in zip(run.readers, started, strict=True)),
    )  # fmt: skip
    (began_at,) = {reader.of("attached")[-1]["step"] for reader in run.readers}
    run.finish()
    assert not difference(expected, [outcome_of(tmp_path / name) for name in names])
    assert began_at == int(older.name.split("-")[1])
    for node in {0, 1, 2} - {lost}:
        said = [
            line for line in run.text(node).splitlines() if f"{newest.name} is not used" in line
        ]
        assert any("rank-00001.safetensors" in line for line in said), run.text(node)


@pytest.mark.full
def test_a_lost_node_is_replaced_from_a_checkpoint_that_requested_its_snapshot(
    nodes: Start, tmp_path: Path, undisturbed: BaselineRuns
) -> None:
    """Snapshots are rarer than the run is long, so all are those that checkpoints request."""
    names = ("rank0.jsonl", "rank1.jsonl")
    expected = undisturbed.of(
        DrillJob("fsdp2", tuple(job_argv("fsdp2", Path("FOLDER"))), names, STEPS), 2
    )
    flags = ("--checkpoint-dir", tmp_path / "saved", "--checkpoint-every", 0.5)
    rarely = ("--erasure", "none", "--snapshot-every", 100_000)
    run = nodes(2, *flags, *rarely, others=1, spares=1, words=job_argv("fsdp2", tmp_path))
    run.start_all()
    written = "checkpoint_written"
    run.wait_for("checkpoints", lambda: len({one["step"] for one in run.journals(written)}) >= 2)
    lost = run.node_of(1)
    run.fault("kill", lost)
    run.may_end(lost)
    run.finish()
    assert not difference(expected, [outcome_of(tmp_path / name) for name in names])
    assert any(
        line["reason"].startswith("checkpoint ") for line in run.journals("restore_point_chosen")
    )


@pytest.mark.full
@pytest.mark.parametrize(("kind", "format_"), [("fsdp2", FORMAT), ("ddp", SHARED_FORMAT)])
def test_more_lost_nodes_than_parity_tolerates_cost_the_steps_since_the_checkpoint(
    nodes: Start, tmp_path: Path, undisturbed: BaselineRuns, kind: str, format_: int
) -> None:
    """Two of three members at once, with 2+1. A checkpoint has the replicas of DDP once."""
    names = tuple(f"rank{rank}.jsonl" for rank in range(3))
    expected = undisturbed.of(
        DrillJob(kind, tuple(job_argv(kind, Path("FOLDER"))), names, STEPS), 3
    )
    saved = tmp_path / "saved"
    flags = ("--erasure", "2+1", "--checkpoint-dir", saved, "--checkpoint-every", 0.5)
    run = nodes(3, *flags, others=2, spares=2, words=job_argv(kind, tmp_path))
    run.start_all()
    run.wait_for("a checkpoint", lambda: run.journals("checkpoint_written"))
    index = parse_index((saved / "latest" / INDEX_NAME).read_bytes(), what="it")
    assert index.format == format_
    lost = [run.node_of(rank) for rank in (1, 2)]
    for node in lost:
        run.fault("kill", node)
    run.may_end(*lost)
    run.finish()
    assert not difference(expected, [outcome_of(tmp_path / name) for name in names])
    assert any(
        line["reason"].startswith("checkpoint ") for line in run.journals("restore_point_chosen")
    )


@pytest.mark.full
@pytest.mark.parametrize(("lost_ranks", "is_in_memory"), [((0, 2), True), ((1, 2), False)])
def test_with_a_mirror_two_lost_nodes_cost_a_checkpoint_only_if_they_are_neighbours(
    nodes: Start,
    tmp_path: Path,
    undisturbed: BaselineRuns,
    lost_ranks: tuple[int, ...],
    is_in_memory: bool,
) -> None:
    names = tuple(f"rank{rank}.jsonl" for rank in range(4))
    expected = undisturbed.of(
        DrillJob("fsdp2", tuple(job_argv("fsdp2", Path("FOLDER"))), names, STEPS), 4
    )
    saved = tmp_path / "saved"
    flags = ("--erasure", "mirror", "--checkpoint-dir", saved, "--checkpoint-every", 0.5)
    run = nodes(4, *flags, others=2, spares=2, words=job_argv("fsdp2", tmp_path))
    run.start_all()
    run.wait_for("a checkpoint", lambda: run.journals("checkpoint_written"))
    run.wait_for_more_steps(5)
    cluster = run.status(run.node_of(3))["cluster"]
    assert cluster["is_mirrored"]
    assert any("protected" in one["states"] for one in cluster["versions"])
    lost = [run.node_of(rank) for rank in lost_ranks]
    for node in lost:
        run.fault("kill", node)
    run.may_end(*lost)
    run.finish()
    assert not difference(expected, [outcome_of(tmp_path / name) for name in names])
    reasons = [line["reason"] for line in run.journals("restore_point_chosen")]
    assert any(one.startswith("checkpoint ") for one in reasons) != is_in_memory, reasons


@pytest.mark.full
@pytest.mark.parametrize(("name", "kind"), IN_FULL)
def test_other_fault_changes_no_byte(
    name: str, kind: str, tmp_path: Path, undisturbed: BaselineRuns
) -> None:
    row = drill(FAULTS[name], kind, tmp_path, undisturbed)
    assert row.equal, row.problem
    assert name != "drained" or (row.steps_lost, row.recoveries) == (0, 1)
    limit_s = LOADED * FAULTS[name].most_s
    assert not limit_s or (row.seconds is not None and row.seconds < limit_s)


@pytest.mark.full
def test_a_rank_that_hangs_in_the_kernel_costs_its_node_and_no_memory(
    nodes: Start, tmp_path: Path, undisturbed: BaselineRuns
) -> None:
    """Only the memory of its node has its shard; a spare takes its place with that."""
    names = ("rank0.jsonl", "rank1.jsonl")
    expected = undisturbed.of(
        DrillJob("fsdp2", tuple(job_argv("fsdp2", Path("FOLDER"))), names, STEPS), 2
    )
    words = job_argv("fsdp2", tmp_path)
    run = nodes(2, "--erasure", "none", others=1, spares=1, words=words)
    run.start_all()
    run.wait_for_step(20)
    smp = run.pid_of(1, "smp")
    with kernel_hang() as hang:
        hang.begin(run.pid_of(1, "rank"))
        run.signal(0, "rank")
        run.wait_for_generation(1)
        assert {run.node_of(0), run.node_of(1)} == {0, 2}
        (stuck,) = run.journal(1, "ranks_stuck")
        assert "rank 1" in stuck["text"]
        assert "has not died of SIGKILL" in stuck["text"]
        assert any(stuck["text"] in line["text"] for line in run.journals("node_unfit"))
        assert run.pid_of(1, "smp") == smp
        hang.end()
        run.wait_for("the node to be fit again", lambda: run.journals("node_fit"))
        run.finish()
    assert not difference(expected, [outcome_of(tmp_path / name) for name in names])


@pytest.mark.full
def test_a_stopped_agent_of_the_only_member_trains_alone(
    nodes: Start, tmp_path: Path, undisturbed: BaselineRuns
) -> None:
    """Its rank continues, and is suspended before its successor on a spare begins."""
    words = job_argv("ddp", Path("FOLDER"))
    expected = undisturbed.of(DrillJob("ddp", tuple(words), ("rank0.jsonl",), STEPS), 1)
    flags = ("--checkpoint-dir", tmp_path / "saved", "--checkpoint-every", 0.5)
    run = nodes(1, *flags, others=2, spares=2, words=job_argv("ddp", tmp_path))
    run.start_all()
    run.wait_for("a checkpoint", lambda: run.journals("checkpoint_written"))
    before = run.node_of(0)
    run.signal(before, "agent", signal.SIGSTOP)
    run.wait_for_generation(1)
    assert run.node_of(0) != before
    run.wait_for_more_steps(20)
    lines = run.readers[0].read()
    successor = next(at for at, line in enumerate(lines) if line["generation"] > 0)
    assert 0 not in {line["generation"] for line in lines[successor:]}, "two trainings"
    run.signal(before, "agent", signal.SIGCONT)
    run.wait_for(f"node{before} to join again", lambda: run.times_joined(before))
    run.finish()
    assert not difference(expected, [outcome_of(tmp_path / "rank0.jsonl")])


@pytest.mark.full  # simulated runs grow, too
def test_a_run_that_has_shrunk_grows_at_a_boundary_and_loses_no_step(
    nodes: Start, tmp_path: Path
) -> None:
    worker = ROOT / "scripts" / "bench_recovery_worker.py"
    words = [worker, "--folder", tmp_path, "--state-mb", 1]
    run = nodes(3, "--nnodes", "2:3", "--set", "nodes.last_call_timeout_s=1", words=words)
    run.start_all()
    run.wait_for_step(10)
    run.fault("reset", 2)
    run.wait_for("a step of two nodes", lambda: run.steps(0, 1))
    run.bring_back(2)
    run.wait_for("a step of all", lambda: run.first_steps(2))
    (shrunk, grown) = run.journals("generation_chosen")[-2:]
    assert (shrunk["text"], grown["text"]) == (
        "generation 1: 2 nodes, 2 ranks",
        "generation 2: 3 nodes, 3 ranks",
    )
    assert grown["reason"] == "grows from 2 to 3 nodes"
    last = run.steps(0, 1)[-1]["step"]
    assert [line["step"] for line in run.first_steps(2)] == [last + 1] * 3


@pytest.mark.full
def test_an_smp_that_dies_while_the_next_agent_of_its_node_starts_is_followed_by_another(
    nodes: Start, tmp_path: Path
) -> None:
    """The agent has found it, and loses it before its loop begins."""
    run = nodes(2)
    run.start_all()
    run.wait_for_step(10)
    smp = run.pid_of(1, "smp")
    os.kill(run.pid_of(1, "agent"), signal.SIGKILL)
    run.wait_for("the next agent", lambda: run.journal(1, "memory_adopted"))
    os.kill(smp, signal.SIGKILL)
    run.wait_for_generation(1)
    assert run.journal(1, "smp_unreachable"), "it was killed too late for this test"
    assert run.journal(1, "smp_respawned")
    run.finish()
    assert run.first_steps(run.generation)[0]["step"] > 1, "it did not resume from memory"


@pytest.mark.full  # test_member.py has the same without processes
def test_two_nodes_that_refuse_each_other_pause_and_none_takes_over(nodes: Start) -> None:
    """A firewall between them resets connections; each other's kernel seems to report a death."""
    run = nodes(2, "--nnodes", "1:2")
    run.start_all()
    run.wait_for_step(5)
    resets(run, "add")
    run.wait_for("both to pause", lambda: all("PAUSED" in run.text(node) for node in (0, 1)))
    assert "refuse" in run.text(0)
    assert "refuse" in run.text(1)
    resets(run, "del")
    run.finish()
    sizes = {line["text"].split(": ")[1] for line in run.journals("generation_chosen")}
    assert sizes == {"2 nodes, 2 ranks"}


def resets(run: NodesRun, change: str) -> None:
    """Answer in each of two nodes for the other one: its own kernel refuses and resets."""
    for node, other in ((0, 1), (1, 0)):
        route = ("ip", "route", change, "local", run.cluster.address(other), "dev", "lo")
        assert run.cluster.run(node, route).wait() == 0


@pytest.mark.full  # test_member.py has the same without processes
def test_survivor_of_two_pauses_and_gives_up_with_76(nodes: Start) -> None:
    run = nodes(2, "--pause-timeout", 3)
    run.start_all()
    run.wait_for_step(5)
    run.fault("kill", 1)
    assert run.wait_for_code(0) == 76
    assert "PAUSED" in run.text(0)
    assert "gives up after 3 s" in run.text(0)


def test_node_with_another_secret_or_none_is_refused_in_words(nodes: Start, tmp_path: Path) -> None:
    right, wrong = (secret_file(tmp_path, name) for name in ("right", "wrong"))
    run = nodes(2, *NO_ZYGOTE, others=1)
    run.start(0, flags=("--secret-file", right))
    run.start(1, flags=("--secret-file", wrong))
    run.start(2)
    run.may_end(1, 2)
    for node in (1, 2):
        assert run.wait_for_code(node) == 2
        assert "secret" in run.text(node)
        assert "Traceback" not in run.text(node)
    assert "UNAUTHENTICATED" in run.text(2)
    assert "UNAUTHENTICATED" not in run.text(0)


def test_run_that_requires_a_secret_does_not_start_without_one(nodes: Start) -> None:
    run = nodes(2)
    run.start(0, flags=("--set", "security.require_secret=true"))
    assert run.wait_for_code(0) == 2
    assert "security.require_secret" in run.text(0)
    assert "head -c 32 /dev/urandom" in run.text(0)


def test_second_node_of_one_name_is_turned_away(nodes: Start) -> None:
    run = nodes(3, *NO_ZYGOTE)
    run.start(0)
    run.start(1, flags=("--node-id", "twin"))
    run.start(2, flags=("--node-id", "twin"))
    run.may_end(1, 2)
    run.wait_for("one of them to be turned away", lambda: any(run.codes().values()))
    codes = run.codes()
    turned_away = 1 if codes[2] is None else 2
    assert codes == {node: 2 if node == turned_away else None for node in range(3)}
    assert "twin" in run.text(turned_away)
    assert "Traceback" not in run.text(turned_away)


def test_node_with_another_number_of_nodes_is_turned_away(nodes: Start) -> None:
    run = nodes(2, *NO_ZYGOTE)
    run.start(0)
    run.start(1, flags=("--nnodes", 3))
    assert run.wait_for_code(1) == 2
    assert "Give the same to every node" in run.text(1)
    assert "Traceback" not in run.text(1)
    assert run.codes()[0] is None
