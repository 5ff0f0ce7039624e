"""Status while a launcher has no agent that answers."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ftrun import process_tree
from ftrun.cli.commands import status
from ftrun.cli.runs import FoundRun, RunLiveness
from ftrun.errors import PeerLost, ProtocolError
from ftrun.wire.messages.status import StatusView, decode_status
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
