"""Status while a launcher has no agent that answers."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from ftrun import process_tree
from ftrun.cli.commands import status
from ftrun.cli.runs import FoundRun, RunLiveness
from ftrun.cli.screen.terminal import show_versions
from ftrun.errors import PeerLost, ProtocolError
from ftrun.wire.messages.checkpoint import CatalogReport, CheckpointInfo
from ftrun.wire.messages.status import StatusView, VersionState, VersionStatus, decode_status
from ftrun.wire.run_environment import RunFolder


@pytest.mark.parametrize(
    ("said", "state", "words"),
    [
        (
            {"bytes": 0, "committed": None},
            "starting",
            "STARTING: the launcher (pid 7) runs",
        ),
        (
            {"bytes": 25_000_000, "committed": [0, 43]},
            "restarting",
            "starts another one; 25.0 MB of snapshots up to step 43 are in memory",
        ),
    ],
    ids=["first-agent", "next-agent"],
)
def test_the_time_between_two_agents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: dict[str, Any], state: str, words: str
) -> None:
    monkeypatch.setattr(FoundRun, "to_smp", lambda _self: SimpleNamespace())
    monkeypatch.setattr(status, "_ask", lambda _channel: json.dumps(said).encode())
    found = status.status_of(FoundRun(RunFolder(tmp_path / "mine"), RunLiveness.STARTING, 7))
    assert found.state == state
    assert words in found.summary


def test_processes_that_have_outlived_launcher_and_smp_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder := tmp_path / "mine").mkdir()
    (folder / "spec.json").write_text('{"script": "/home/me/train.py"}')
    monkeypatch.setattr(process_tree, "left_behind", lambda _folder: [os.getpid()])
    monkeypatch.setattr(process_tree, "name_of", lambda pid: {os.getpid(): "train.sh"}[pid])
    found = status.status_of(FoundRun(RunFolder(folder), RunLiveness.ORPHANED))
    assert found.state == "orphaned"
    assert found.summary.startswith("ORPHANED: the launcher and the SMP have ended")
    assert f"{os.getpid()} (train.sh). `ftrun stop mine` ends them" in found.summary
    assert found.script == "/home/me/train.py"


def test_an_orphan_that_has_ended_in_between_has_no_status(tmp_path: Path) -> None:
    with pytest.raises(PeerLost):
        status.status_of(FoundRun(RunFolder(tmp_path / "mine"), RunLiveness.ORPHANED))


def test_a_status_of_another_version_is_refused() -> None:
    with pytest.raises(ProtocolError, match=r"of run x has another form: .*started the run"):
        decode_status(b'{"run_id": "x", "verdict": "running"}', StatusView, source="run x")


# --- ftrun status --versions ------------------------------------------------------------------


def with_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *found: CheckpointInfo
) -> FoundRun:
    """A run whose directory holds these checkpoints."""
    (folder := tmp_path / "mine").mkdir()
    (tmp_path / "saved").mkdir()
    spec = {"cwd": str(tmp_path), "profile": {"checkpoint": {"directory": "saved"}}}
    (folder / "spec.json").write_text(json.dumps(spec))
    asked: list[tuple[str, ...]] = []

    def ask(*words: str, limit_s: float) -> CatalogReport:
        assert limit_s <= 60.0
        asked.append(words)
        return CatalogReport(words[1], list(found))

    monkeypatch.setattr(status, "ask_catalog", ask)
    return FoundRun(RunFolder(folder), RunLiveness.RUNNING, 7)


def test_checkpoints_are_shown_next_to_the_versions_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = with_checkpoints(
        tmp_path,
        monkeypatch,
        CheckpointInfo("step-9", "", run_id="mine", generation=1, step=9, num_bytes=7),
        CheckpointInfo("step-8", "", run_id="mine", generation=1, step=8, written_s=1.0),
        CheckpointInfo("step-00000007-g1", "", problems=("its index is missing",)),
        CheckpointInfo("copy", "", problems=("its index is missing",)),
        CheckpointInfo("step-6", "", run_id="another", generation=1, step=6),
    )
    newest = VersionStatus(1, 9, (VersionState.COMMITTED,), 2.0, 100)
    view = StatusView(run_id="mine", state="running", summary="", versions=(newest,))
    found = status.with_disk(view, run).versions
    assert [(one.generation, one.step, one.states) for one in found] == [
        (1, 9, ("committed", "persisted")),
        (1, 8, ("persisted",)),
        (1, 7, ("void",)),
        (-1, -1, ("void",)),
    ]
    assert found[0].num_bytes == 100
    assert found[1].age_s is not None
    assert found[2].note == "step-00000007-g1: its index is missing"


def test_without_a_directory_there_are_only_versions_in_memory(tmp_path: Path) -> None:
    (folder := tmp_path / "mine").mkdir()
    view = StatusView(run_id="mine", state="running", summary="")
    for directory in (None, "not written yet"):
        spec = {"cwd": str(tmp_path), "profile": {"checkpoint": {"directory": directory}}}
        (folder / "spec.json").write_text(json.dumps(spec))
        run = FoundRun(RunFolder(folder), RunLiveness.RUNNING, 7)
        assert status.with_disk(view, run) == view


def test_a_directory_that_does_not_answer_leaves_the_versions_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder := tmp_path / "mine").mkdir()
    spec = {"cwd": str(tmp_path), "profile": {"checkpoint": {"directory": "saved"}}}
    (folder / "spec.json").write_text(json.dumps(spec))
    monkeypatch.setattr(status, "LIMIT_S", 0.001)  # no process starts in that time
    newest = VersionStatus(1, 9, (VersionState.COMMITTED,), 2.0, 100)
    view = StatusView(run_id="mine", state="running", summary="", versions=(newest,))
    assert status.with_disk(view, FoundRun(RunFolder(folder), RunLiveness.RUNNING, 7)) == view
    out, err = capsys.readouterr()
    assert out == ""
    assert "did not answer within" in err


def test_versions_are_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    view = StatusView(
        run_id="mine",
        state="running",
        summary="",
        versions=(
            VersionStatus(
                3, 1210, (VersionState.CAPTURING,), None, 10,
                {"a": VersionState.SEALED, "b": VersionState.CAPTURING},
            ),
            VersionStatus(3, 1200, (VersionState.COMMITTED, VersionState.PROTECTED), 4.1, 10**9),
        ),
    )  # fmt: skip
    show_versions(view)
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["version", "state", "age", "size", "on", "the", "nodes"]
    assert "step 1,210 (generation 3)" in rows[0]
    assert "a: sealed, b: capturing" in rows[0]
    assert "committed, protected" in rows[1]
    assert "1.0 GB" in rows[1]
    show_versions(StatusView(run_id="mine", state="running", summary=""))
    assert "holds a version" in capsys.readouterr().out


def test_versions_are_not_polled() -> None:
    found = CliRunner().invoke(status.app, ["--watch", "--versions"])
    assert "exclude each other" in str(found.exception)
