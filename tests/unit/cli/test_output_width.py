"""Output to a file or a pipe has no width; on a terminal text is wrapped, never cut."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import msgspec
import pytest
from made_networks import made_network
from typer.testing import CliRunner

from ftrun.cli.app import app
from ftrun.cli.launch.profiles import find_profile, read_profile, shown_path
from ftrun.cli.screen import terminal as render
from ftrun.cli.screen.status_page import page
from ftrun.tools.network_view.facts import NetworkReport, network_facts
from ftrun.tools.network_view.text import show_network
from ftrun.wire.messages.status import NetworkStatus, StatusView

LONG = "a reason that is longer than any line, " * 8 + "and its end"
WORD = "/a/folder/whose/path/" + "x" * 300

STATUS: dict[str, Any] = {
    "run_id": "big",
    "state": "running",
    "summary": f"running at step 7; {LONG}",
    "script": WORD,
    "cluster": {
        "state": "running",
        "summary": "",
        "nodes": [
            {"node_id": f"node-{'n' * 90}", "host": "h" * 90, "role": "spare",
             "last_heartbeat_age_s": 0.1, "failure_reason": LONG}
        ],
    },
    "ranks": [
        {"rank": 0, "pid": 1, "state": "running", "step": 7, "heartbeat_age_s": 0.1,
         "phase": "p" * 200}
    ],
    "snapshots": {"step": 6, "note": LONG},
    "restarts": [{"generation": 1, "cause": LONG}],
    "checkpoint": {"directory": WORD, "step": 3, "last_error": LONG},
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runtime").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture(params=["40", None], ids=["COLUMNS=40", "no COLUMNS"])
def columns(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment's width, which counts for terminals only."""
    monkeypatch.setenv("TERM", "dumb")
    if request.param is None:
        monkeypatch.delenv("COLUMNS", raising=False)
    else:
        monkeypatch.setenv("COLUMNS", request.param)


@pytest.mark.usefixtures("columns")
class TestPiped:
    """The output to a file or a pipe."""

    def test_no_table_is_wrapped_cut_or_padded(self, capsys: pytest.CaptureFixture[str]) -> None:
        render.show_table(["one", "two"], [(WORD, LONG), ("short", "words")])
        render.show_pairs([(WORD, LONG), ("short", "words")])
        render.show_profile([("key", WORD, "mine.yaml:1", LONG), ("k", "v", "default", "words")])
        out = capsys.readouterr().out
        assert all(line == line.rstrip() for line in out.splitlines())
        assert len(out.splitlines()) == 3 + 2 + 3
        assert out.count(WORD) == out.count(LONG) == 3

    def test_colours_that_are_forced_change_no_line(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("FORCE_COLOR", "1")
        render.show_pairs([(WORD, LONG), ("short", "words")])
        out = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
        assert [line.split(maxsplit=1) for line in out.splitlines()] == [
            [WORD, LONG],
            ["short", "words"],
        ]

    def test_status_of_a_run(self, capsys: pytest.CaptureFixture[str]) -> None:
        render.show_status(msgspec.convert(STATUS, StatusView))
        lines = capsys.readouterr().out.splitlines()
        # Summary, run, two tables with a heading and a row each, and the lines below them.
        assert len(lines) == 2 + 2 + 2 + 1 + 2 + 2
        text = "\n".join(lines)
        for said in (LONG, WORD, "h" * 90, "p" * 200):
            assert said in text

    def test_status_that_is_watched(self) -> None:
        nodes = [{"node_id": f"node{at}", "ranks": [{"rank": at, "state": "stopped", "step": at}],
                  "failure_reason": f"{at}: {LONG[:149]}"} for at in range(100)]  # fmt: skip
        document = {**STATUS, "cluster": {**STATUS["cluster"], "nodes": nodes}}
        view = msgspec.convert(document, StatusView)
        found = page(view, width=sys.maxsize, height=sys.maxsize, steps_per_s=None)
        text = "\n".join(line.text for line in found)
        assert "..." not in text
        assert all(f"{at}: {LONG[:149]}" in text for at in range(100))

    def test_network_of_a_run(self, capsys: pytest.CaptureFixture[str]) -> None:
        name = f"eth-{'y' * 60}"
        part = msgspec.convert(made_network(rails=(name, "eth1")), NetworkStatus)
        show_network(NetworkReport("big", part, is_live=True, source="big"), network_facts(part))
        lines = capsys.readouterr().out.splitlines()
        assert sum(line.startswith(f"{name}  ") for line in lines) == 1
        assert not any("…" in line for line in lines)


@pytest.mark.parametrize(
    ("words", "known"),
    [
        (["profiles"], "single-node-gpu"),
        (["profiles", "show", "laptop"], "snapshot.overhead_budget"),
        (["profiles", "show", "laptop", "--origin"], "laptop.yaml:7"),
        (["estimate", "--nodes", "16"], "every 141 steps (--snapshot-every 141): "),
        (["drill", "--list"], "drill-quick"),
        (["inject-fault", "--list"], "rank-kill"),
        (["manifest", "slurm", "--", "--nnodes", "2", "--checkpoint-dir", WORD, "t.py"], WORD),
        (["--help"], "--snapshot-every"),
        (["status"], "no run of yours is alive on this machine. Start one: ftrun train.py"),
        (["report", "--run", "x" * 200], "x" * 200),
        (["network", "x" * 90], "x" * 90),
        (["profiles", "show", "x" * 200], "x" * 200),
    ],
    ids=lambda value: " ".join(value)[:30] if isinstance(value, list) else "",
)
def test_command_prints_the_same_lines_at_any_width(
    words: list[str], known: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    lines = printed(words)
    assert any(known in line for line in lines), f"{words} gives {lines}"
    assert not any("…" in line for line in lines)
    monkeypatch.setenv("COLUMNS", "40")
    assert printed(words) == lines


def printed(words: list[str]) -> list[str]:
    done = CliRunner().invoke(app, words)
    return [*done.stdout.splitlines(), *str(done.exception or "").splitlines()]


def on_terminal(columns: int, *words: str) -> str:
    """A command's output on a terminal of that width."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    env = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES")}
    command = [sys.executable, "-m", "ftrun", *words]
    env |= {"TERM": "xterm", "NO_COLOR": "1"}
    with subprocess.Popen(command, stdout=theirs, stdin=theirs, stderr=theirs, env=env):
        os.close(theirs)
        found = b""
        while chunk := _read(ours):
            found += chunk
    os.close(ours)
    return re.sub(r"\x1b\[[0-9;]*m", "", found.decode().replace("\r\n", "\n"))


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, 65536)
    except OSError:  # EIO: the other end is closed
        return b""


def test_a_terminal_wraps_and_cuts_nothing() -> None:
    shown = on_terminal(60, "profiles", "show", "laptop", "--origin")
    assert max(len(line) for line in shown.splitlines() if not line.startswith("#")) <= 60
    assert "…" not in shown
    cells = "".join(shown.split())
    for setting in read_profile(find_profile("laptop")).settings:
        # A cell is as wide as its column, so that a long text takes several lines.
        assert str(setting)[:12] in cells
    assert shown.count("laptop") >= len(read_profile(find_profile("laptop")).settings)


def test_origins_are_short_whatever_the_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    (here / "below").mkdir(parents=True)
    monkeypatch.chdir(here)
    for path in (here / "mine.yaml", here / "below" / "it.yaml", tmp_path / "out.yaml"):
        path.write_text("smp:\n  orphan_timeout_s: 3\n")

    def origin(path: Path) -> str:
        (setting,) = read_profile(path).settings
        return setting.origin

    assert origin(here / "mine.yaml") == "mine.yaml:2"
    assert origin(Path("below/it.yaml")) == origin(here / "below" / "it.yaml") == "below/it.yaml:2"
    assert origin(tmp_path / "out.yaml") == f"{tmp_path}/out.yaml:2"
    assert all(
        re.fullmatch(r"laptop\.yaml:\d+", setting.origin)
        for setting in read_profile(find_profile("laptop")).settings
    )
    assert shown_path(find_profile("laptop")) == "laptop.yaml"
