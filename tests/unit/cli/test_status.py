"""What status says while a launcher has no agent that answers."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ftrun.cli.commands import status
from ftrun.cli.runs import FoundRun, RunLiveness
from ftrun.wire.run_environment import RunFolder


@pytest.mark.parametrize(
    ("said", "state", "words"),
    [
        (
            {"bytes": 0, "committed": None},
            "starting",
            "STARTING: the launcher (pid 7) has",
        ),
        (
            {"bytes": 25_000_000, "committed": [0, 43]},
            "restarting",
            "starts another; 25.0 MB of snapshots up to step 43 are in memory",
        ),
    ],
    ids=["first-agent", "next-agent"],
)
def test_the_time_between_two_agents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: dict[str, Any], state: str, words: str
) -> None:
    monkeypatch.setattr(FoundRun, "to_smp", lambda _self: SimpleNamespace())
    monkeypatch.setattr(status, "_ask", lambda _channel: said)
    found = status.document_of(FoundRun(RunFolder(tmp_path / "mine"), RunLiveness.STARTING, 7))
    assert found["state"] == state
    assert words in found["verdict"]
