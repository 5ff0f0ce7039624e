"""Observation of a real run: the live page, logs over a restart, /metrics, hooks, pulses.

A run is long and its failures are rare, so one run serves many checks.
"""

import contextlib
import json
import os
import pty
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from fcntl import ioctl
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ftrun.cli.screen.text import duration
from tests.integration.conftest import WAIT_S, Run, Start, free_port

TRAIN = """
import os, sys, time
import torch
import torch.distributed as dist
import ftrun

dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.Linear(8, 8)
weight = model.weight
optimizer = torch.optim.SGD([weight], lr=0.1)
session = ftrun.attach(model=model, optimizer=optimizer)
print(f"begin rank={rank} generation={session.generation}", flush=True)
for step in session.steps(1 << 30):
    weight.grad = torch.ones(8, 8)
    dist.all_reduce(weight.grad)
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step} of rank {rank}", flush=True)
    if rank == 1 and os.path.exists("die"):
        os.unlink("die")
        print("last words of rank 1", flush=True)
        os.kill(os.getpid(), 9)
    # Decided together: a rank that saw the file one step earlier would leave the other alone.
    stop = torch.tensor(float(os.path.exists("stop")))
    dist.all_reduce(stop)
    if stop:
        break
    time.sleep(0.02)
dist.barrier()
dist.destroy_process_group()
"""

FTRUN = [sys.executable, "-m", "ftrun"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def until(what: str, condition: Callable[[], object]) -> None:
    give_up_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < give_up_s, f"not {what} within {WAIT_S} s"
        time.sleep(0.05)


def _at_a_terminal() -> None:
    ioctl(0, termios.TIOCSCTTY, 0)
    # These tests may be a shell's background job. It ignores ^C, and its children inherit that.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Terminal:
    """A command on a terminal of its own."""

    def __init__(self, run: Run, *words: str, columns: int = 100, lines: int = 30) -> None:
        master, slave = pty.openpty()
        ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.before = termios.tcgetattr(slave)
        variables = {**run.variables, "TERM": "xterm-256color"}
        self.process = subprocess.Popen(
            [*FTRUN, *words], cwd=run.folder, env=variables, stdin=slave, stdout=slave,
            stderr=slave, start_new_session=True,
            preexec_fn=_at_a_terminal,
        )  # fmt: skip
        self.master, self.slave = master, slave
        self.output = ""

    def read_until(self, pattern: str) -> None:
        give_up_s = time.monotonic() + WAIT_S
        while not re.search(pattern, self.output):
            assert time.monotonic() < give_up_s, f"no {pattern!r} in:\n{self.output[-3000:]!r}"
            self.read()

    def read(self) -> None:
        while select.select([self.master], [], [], 0.1)[0]:
            self.output += os.read(self.master, 1 << 16).decode(errors="replace")

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(WAIT_S)
        self.after = termios.tcgetattr(self.slave)
        os.close(self.master)
        os.close(self.slave)


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def scrape(port: int, token: str | None = None) -> dict[str, float]:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            text = answer.read().decode()
    except urllib.error.HTTPError as error:
        error.close()
        raise
    except OSError:
        return {}
    return {
        sample.name + "".join(f" {value}" for _, value in sorted(sample.labels.items())): value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        for value in [sample.value]
    }


def figures(port: int, token: str) -> dict[str, float]:
    """The served metrics; a busy agent may cut off a slow client."""
    found: dict[str, float] = {}
    until("figures", lambda: found.update(scrape(port, token)) or found)
    return found


def logs(run: Run, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*FTRUN, "logs", run.run_id, *words], cwd=run.folder, env=run.variables, text=True,
        capture_output=True, timeout=WAIT_S, check=False,
    )  # fmt: skip


@pytest.mark.full  # tests/unit/cli has each view
def test_all_that_look_at_a_run_see_its_failure(
    start: Start, script: Callable[..., str], tmp_path: Path
) -> None:
    name = script(TRAIN)
    port = free_port()
    (tmp_path / "token").write_text("abc\n")
    hook = 'cat >> seen; echo "$FTRUN_INCIDENT_EVENT $FTRUN_INCIDENT_CULPRITS" >> events; exit 4'
    run = start(
        "--nproc-per-node", "2", "--redirects", "3", "--metrics-port", str(port),
        "--set", "metrics.token_file=token", "--set", f"hooks.on_incident='{hook}'", name,
    )  # fmt: skip
    run.wait_for_step(3)
    with pytest.raises(urllib.error.HTTPError, match="401"):
        scrape(port)
    assert figures(port, "abc")["ftrun_step"] >= 3
    screen = Terminal(run, "status", run.run_id, "--watch", "--every", "0.2")
    followed = (tmp_path / "followed").open("w")
    follower = subprocess.Popen(
        [*FTRUN, "logs", run.run_id, "-f"], cwd=tmp_path, env=run.variables, stdout=followed,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        screen.read_until(r"running at step \d+")
        until("followed", lambda: "1 | step" in (tmp_path / "followed").read_text())
        (tmp_path / "die").touch()
        run.wait_until("over it", lambda: run.journal("incident_closed"))
        screen.read_until(r"incident 1  .* ago: crash \(training again after")
        screen.process.send_signal(signal.SIGTSTP)
        screen.read_until(r"\x1b\[\?1049l")
        # It stops a moment after it has left the screen; an earlier signal would have no effect.
        until("stopped", lambda: state(screen.process.pid) == "T")
        screen.process.send_signal(signal.SIGCONT)
        screen.read_until(r"(?s)\x1b\[\?1049l.*\x1b\[\?1049h.*running at step")
        screen.process.send_signal(signal.SIGINT)
        until("left", lambda: (screen.read(), screen.process.poll() is not None)[1])
        _check_status(run)
        _check_figures(port)
        _check_downtime(run, port)
        _check_logs(run)
        (tmp_path / "stop").touch()
        assert run.wait() == 0, run.text
        assert follower.wait(WAIT_S) == 0
    finally:
        follower.kill()
        follower.wait(WAIT_S)
        followed.close()
        screen.close()
    _check_screen(screen)
    _check_hooks(run)
    lines = (tmp_path / "followed").read_text().splitlines()
    assert lines.index("1 | last words of rank 1") < lines.index("1 | begin rank=1 generation=1")
    assert lines[-1].split(" | ")[1].startswith("step ")
    last = run.journal("progress")[-1]
    assert last["committed"][0] == 1  # type: ignore[index]
    assert [row[0] for row in last["ranks"]] == [0, 1]  # type: ignore[attr-defined]
    assert last["step"] > 0  # type: ignore[operator]
    assert last["p50_s"] > 0.01  # type: ignore[operator]


def _check_status(run: Run) -> None:
    run.wait_for_step(1, generation=1)
    document: dict[str, Any] = run.status()
    (incident,) = document["incidents"]
    assert incident["state"] == "closed"
    assert incident["culprits"] == [1]
    assert incident["steps_lost"] is not None
    assert document["lifecycle"] == "run"
    assert all(0.01 < rank["step_p50_s"] <= rank["step_p99_s"] for rank in document["ranks"])


def _check_figures(port: int) -> None:
    found = figures(port, "abc")
    assert found["ftrun_incidents_total crash"] == 1
    assert found["ftrun_restarts_total"] == 1
    assert found["ftrun_generation"] == 1
    assert found["ftrun_recovery_seconds_count total"] == 1
    assert 0 < found["ftrun_goodput_ratio"] <= 1
    assert found["ftrun_time_seconds_total program_startup"] > 0
    assert found["ftrun_time_seconds_total infrastructure_recovery_from_disruption"] > 0
    assert sum(value for name, value in found.items() if name.startswith("ftrun_rank_up")) == 2


def _check_downtime(run: Run, port: int) -> None:
    """Log, journal, status, metrics and report show the same duration."""
    (reported,) = run.journal("downtime")
    total_s = reported["total_s"]
    parts = ("detection_s", "restart_s", "restore_s", "first_step_s")
    assert sum(reported[name] for name in parts) == pytest.approx(total_s, abs=0.003)  # type: ignore[misc]
    (closed,) = run.journal("incident_closed")
    (incident,) = run.status()["incidents"]  # type: ignore[attr-defined]
    assert closed["recovered_s"] == incident["recovered_s"] == total_s
    assert figures(port, "abc")["ftrun_recovery_seconds_sum total"] == pytest.approx(total_s)
    assert f"training again {total_s:.2f} s after the fault (detection" in run.text
    shown = subprocess.run([*FTRUN, "report", "1", "--run", run.run_id, "--json"],
                           cwd=run.folder, env=run.variables, capture_output=True, text=True,
                           timeout=WAIT_S, check=True).stdout  # fmt: skip
    took = duration(total_s)  # type: ignore[arg-type]
    assert f"training {took} after the fault" in shown
    assert f"training again after {took}" in shown


def _check_logs(run: Run) -> None:
    every = logs(run)
    assert every.returncode == 0, every.stderr
    lines = every.stdout.splitlines()
    assert all(re.match(r"[01] \| ", line) for line in lines)
    assert lines.index("1 | last words of rank 1") < lines.index("0 | begin rank=0 generation=1")
    assert "killed by SIGKILL" in every.stderr
    culprit = logs(run, "--incident", "last")
    assert culprit.stdout.splitlines()[-1] == "1 | last words of rank 1"
    assert "incident 1, generation 0" in culprit.stderr
    words = ("-r", "0", "--generation", "1", "-n")
    until("two lines", lambda: logs(run, *words, "9").stdout.count("0 | step") >= 2)
    one = logs(run, *words, "2").stdout.splitlines()
    # Of each of its files; the other one has the output of attach about the restore.
    assert len([line for line in one if line.endswith(" of rank 0")]) == 2
    assert all(line.startswith("0 | step") for line in one)
    nobody = logs(run, "-r", "7")
    assert nobody.returncode == 2
    assert "ranks 0, 1" in nobody.stderr


def _check_screen(screen: Terminal) -> None:
    assert screen.process.returncode == 0
    enter, leave = "\x1b[?1049h", "\x1b[?1049l"
    assert screen.output.count(enter) == screen.output.count(leave) == 2  # once for ^Z
    assert screen.output.rindex(leave) > screen.output.rindex(enter)
    assert screen.after == screen.before
    assert screen.output.rindex("\x1b[?25h") > screen.output.index("\x1b[?25l")
    assert "Traceback" not in screen.output


def _check_hooks(run: Run) -> None:
    assert (run.folder / "events").read_text() == "verdict 1\nclosed 1\n"
    texts = (run.folder / "seen").read_text().replace("}{", "}\n{").splitlines()
    first, second = map(json.loads, texts)
    assert first["confidence"] == "certain"
    assert second["verified"]["progress"] is True
    assert second["run_id"] == run.run_id
    failed = run.journal("hook_failed")
    assert [line["reason"] for line in failed] == ["it ended with 4"] * 2
    assert "hooks.on_incident failed for incident 1" in run.text


@pytest.mark.full
def test_what_cannot_be_served_or_shown_is_reported_and_the_run_continues(
    start: Start, script: Callable[..., str], tmp_path: Path
) -> None:
    name = script(TRAIN)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        run = start("--nproc-per-node", "1", "--metrics-port", str(port), name)
        run.wait_for_step(2)
        assert run.status()["metrics"] is None
        (line,) = run.journal("metrics_disabled")
        assert "in use" in str(line["reason"])
        assert f"no metrics are served at 127.0.0.1 port {port}" in run.text
        nothing = logs(run)
        assert nothing.returncode == 1
        assert "--redirects 3" in nothing.stderr
        blocks = subprocess.Popen(
            [*FTRUN, "status", "--watch", "--every", "0.2", run.run_id], cwd=tmp_path, text=True,
            env=run.variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert blocks.stdout is not None
        with contextlib.closing(blocks.stdout):
            first = [blocks.stdout.readline() for _ in range(12)]
            (tmp_path / "stop").touch()
            assert run.wait() == 0, run.text
            rest = blocks.stdout.read()
    assert blocks.wait(WAIT_S) == 0
    assert "\x1b" not in "".join(first) + rest
    assert sum(line.startswith("running at step") for line in first) >= 1
    assert "the run has ended. Last status: " in rest


class TwoNodes:
    """Both nodes of a run on this machine, each with one rank."""

    def __init__(self, folder: Path, name: str, hook: str) -> None:
        self.folder, self.name = folder, f"two-{os.getpid()}"
        self.variables = {k: v for k, v in os.environ.items() if not k.startswith("FTRUN_")}
        self.ports = [free_port(), free_port()]
        endpoint = f"127.0.0.1:{free_port()}"
        self.outputs = [(folder / f"n{number}.out").open("w") for number in range(2)]
        self.nodes = [
            subprocess.Popen(
                [*FTRUN, "--run-id", self.name, "--node-id", f"n{number}", "--nnodes", "2",
                 "--rdzv-endpoint", endpoint, "--nproc-per-node", "1", "--redirects", "3",
                 "--metrics-port", str(self.ports[number]), "--set", f"hooks.on_incident={hook}",
                 name],
                cwd=folder, env=self.variables, stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT,
                stdout=self.outputs[number],
            )
            for number in range(2)
        ]  # fmt: skip

    def ask(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*FTRUN, *words], cwd=self.folder, env=self.variables, text=True,
                              capture_output=True, timeout=WAIT_S, check=False)  # fmt: skip

    def status(self, node: str) -> dict[str, Any]:
        found = self.ask("status", f"{self.name}@{node}", "--json").stdout
        return json.loads(found) if found else {}

    def journal(self, node: str) -> list[dict[str, Any]]:
        path = self.folder / "ftrun-logs" / self.name / node / "journal.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]

    def end(self) -> None:
        for node in self.nodes:
            node.terminate()
        for number, node in enumerate(self.nodes):
            try:
                node.wait(30)
            except subprocess.TimeoutExpired:
                node.kill()
                node.wait(30)
                self.ask("stop", f"{self.name}@n{number}")  # the memory that it has left
        for output in self.outputs:
            output.close()


@pytest.mark.full
def test_the_node_that_leads_shows_and_reports_for_all(
    script: Callable[..., str], tmp_path: Path
) -> None:
    run = TwoNodes(
        tmp_path, script(TRAIN), "echo $FTRUN_INCIDENT_EVENT $FTRUN_INCIDENT_NODES >> seen"
    )
    try:
        until("past step 3", lambda: scrape(run.ports[0]).get("ftrun_step", 0) >= 3)
        (tmp_path / "die").touch()
        until("over it", lambda: (tmp_path / "seen").exists()
              and "closed" in (tmp_path / "seen").read_text())  # fmt: skip
        until("counted", lambda: any("crash" in name for one in run.ports for name in scrape(one)))
        whole, part = scrape(run.ports[0]), scrape(run.ports[1])
        if "ftrun_goodput_ratio" not in whole:
            whole, part = part, whole
        assert whole["ftrun_nodes member"] == 2
        assert whole["ftrun_incidents_total crash"] == 1
        ups = [[name for name in one if name.startswith("ftrun_rank_up")] for one in (whole, part)]
        # The first node that listens at the endpoint has rank 0.
        (first,) = [name.split()[1] for name in ups[0] if name.endswith(" 0")]
        (second,) = {"n0", "n1"} - {first}
        assert ups[0] == [f"ftrun_rank_up {first} 0", f"ftrun_rank_up {second} 1"]
        assert len(ups[1]) == 1
        assert "ftrun_goodput_ratio" not in part
        for node in ("n0", "n1"):
            document = run.status(node)
            assert document["incidents"][0]["nodes"] == [second]
            assert document["lifecycle"] == "run"
            (rank,) = document["cluster"]["nodes"][1]["ranks"]
            assert rank["step_p50_s"] > 0.01
        words = run.ask("logs", run.name, "--incident", "last").stdout.splitlines()
        assert words[-1] == f"{second}:1 | last words of rank 1"
        every = run.ask("logs", run.name).stdout
        assert f"{first}:0 | begin rank=0 generation=1" in every
        assert f"{first}:0 | " not in run.ask("logs", run.name, "--node", second).stdout
        (tmp_path / "stop").touch()
        assert [node.wait(WAIT_S) for node in run.nodes] == [0, 0]
    finally:
        run.end()
    assert (tmp_path / "seen").read_text() == f"verdict {second}\nclosed {second}\n"
    for node in ("n0", "n1"):
        last = [line for line in run.journal(node) if line["kind"] == "progress"][-1]
        assert [row[0] for row in last["ranks"]] == [0 if node == first else 1]


CANNOT_BE_SAVED = """
import os, time
import torch
import ftrun

class Odd:
    is_broken = False

    def state_dict(self):
        return {"value": print if self.is_broken else 1}

    def load_state_dict(self, state):
        pass

model, odd = torch.nn.Linear(4, 4), Odd()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = ftrun.attach(model, optimizer, odd=odd)
for step in session.steps(1 << 30):
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    odd.is_broken = os.environ["RANK"] == "1" and os.path.exists("break")
    time.sleep(0.02)
    if os.path.exists("stop"):
        break
"""


@pytest.mark.full
@pytest.mark.launch
def test_a_rank_without_snapshots_is_shown_by_each_node(
    script: Callable[..., str], tmp_path: Path
) -> None:
    run = TwoNodes(tmp_path, script(CANNOT_BE_SAVED), "echo")
    try:
        until("protected", lambda: scrape(run.ports[0]).get("ftrun_protected") == 1)
        (tmp_path / "break").touch()
        until("noticed", lambda: scrape(run.ports[0]).get("ftrun_protected") == 0)
        for node in ("n0", "n1"):
            document = run.status(node)
            assert "UNPROTECTED" in document["summary"], document["summary"]
            assert "odd" in document["snapshots"]["unprotected_reason"]
            assert not document["snapshots"]["protected"]
        (tmp_path / "stop").touch()
        assert [node.wait(WAIT_S) for node in run.nodes] == [0, 0]
    finally:
        run.end()
