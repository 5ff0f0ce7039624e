"""Hooks receive the events, and their failures have no effect on the run."""

import http.server
import json
import os
import threading
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ftrun import clock
from ftrun.agent.publish import hooks
from ftrun.agent.publish.hooks import (
    MAX_WAITING,
    Hooks,
    Webhook,
    document,
    run_command,
    variables_of,
)
from ftrun.config.profile import HooksConfig
from ftrun.events import Record
from ftrun.journal import Journal
from ftrun.monitor.verdicts import Confidence, Verdict, VerdictKind
from ftrun.records.decode import decode
from ftrun.records.incidents import IncidentClosed, IncidentVerification, VerdictRecord
from ftrun.records.run import HookFailed, ProgressRecord

NASTY = "a'; touch pwned; echo \"$(touch pwned)`touch pwned`\n\0\ud800"
VERDICT = VerdictRecord(
    NASTY,
    3,
    Verdict(
        VerdictKind.CRASH,
        (1, 2),
        NASTY,
        nodes=("n0",),
        victims=(0,),
        evidence=("it is dead",),
        confidence=Confidence.CERTAIN,
    ),
)
CLOSED = IncidentClosed(
    "over", 3, "crash", (1,), (), IncidentVerification(progress=True, loss="continuous"), "respawn",
    ("kill", "respawn"), 0.5, detected_s=0.1, recovered_s=0.4, steps_lost=1,
)  # fmt: skip
FACTS = {"run_id": "r", "script": "train.py", "node": "n0", "generation": 1}


def reported() -> dict[str, Any]:
    return document(VERDICT, FACTS)


def test_what_a_hook_receives() -> None:
    first, last = reported(), document(CLOSED, FACTS)
    assert first["event"] == "verdict"
    assert first["culprits"] == (1, 2)
    assert first["evidence"] == ("it is dead",)
    assert last["event"] == "closed"
    assert last["verdict_kind"] == first["verdict_kind"] == "crash"
    assert (first["number"], first["confidence"], first["counter_evidence"]) == (3, "certain", ())
    assert last["recovered_s"] == 0.4
    assert first["run_id"] == last["run_id"] == "r"
    variables = variables_of(first)
    assert variables["FTRUN_INCIDENT_CULPRITS"] == "1,2"
    assert all("\0" not in value for value in variables.values())


def test_data_reach_the_command_and_never_the_shell(tmp_path: Path) -> None:
    command = 'cat > body; printf %s "$FTRUN_INCIDENT_TEXT" > text; exit 0'
    assert run_command(command, reported(), str(tmp_path)) == ""
    assert json.loads((tmp_path / "body").read_text())["text"] == NASTY
    assert (tmp_path / "text").read_text().startswith("a'; touch pwned; echo")
    assert not (tmp_path / "pwned").exists()


def test_what_a_failed_command_has_reported_is_kept(tmp_path: Path) -> None:
    assert run_command("echo no such mail server >&2; exit 3", {}, str(tmp_path)) == (
        "it ended with 3: no such mail server"
    )
    assert run_command("kill -9 $$", {}, str(tmp_path)) == "it was killed by signal 9"
    long = run_command("yes | head -c 1000000; exit 1", {}, str(tmp_path))
    assert len(long) < 3000


def test_a_command_that_does_not_end_is_killed_with_all_it_has_started(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "alive")
    reader = os.open(tmp_path / "alive", os.O_RDONLY | os.O_NONBLOCK)
    reason = run_command("exec 9> alive; sleep 600 & sleep 600", {}, str(tmp_path), limit_s=0.3)
    assert reason == "it was killed after 0.3 s"
    with open(reader, "rb") as pipe:
        os.set_blocking(reader, True)
        assert pipe.read() == b""  # its end: no process is left that could write


def test_what_a_command_leaves_behind_does_not_hold_up_the_next(tmp_path: Path) -> None:
    assert run_command("sleep 600 & exit 0", {}, str(tmp_path), limit_s=60) == ""


def failures(folder: Path) -> list[HookFailed]:
    lines = map(decode, (folder / "journal.jsonl").read_bytes().splitlines())
    records = [line.record for line in lines if line is not None]
    return [one for one in records if isinstance(one, HookFailed)]


def hooks_of(folder: Path, **settings: str) -> Hooks:
    return Hooks(HooksConfig(**settings), Journal(folder), facts=lambda: FACTS,
                 cwd=str(folder))  # fmt: skip


def test_a_failed_hook_is_a_line_in_the_journal_and_the_next_is_reported(tmp_path: Path) -> None:
    found = hooks_of(tmp_path, on_incident="cat >> all; exit 7")
    records: tuple[Record, ...] = (VERDICT, ProgressRecord(1, 1), CLOSED)
    for record in records:
        found.take(record)
    found.close(clock.now_s() + 60)
    assert (tmp_path / "all").read_text().count('"event"') == 2
    first, second = failures(tmp_path)
    assert first.reason == "it ended with 7"
    assert (first.event, second.event) == ("verdict", "closed")
    assert first.hook == "on_incident"


def test_only_a_limited_number_wait(tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    found = hooks_of(tmp_path, on_incident="while [ -e go ]; do sleep 0.05; done; echo x >> ran")
    for _ in range(MAX_WAITING + 3):
        found.take(VERDICT)
    refused = failures(tmp_path)
    (tmp_path / "go").unlink()
    assert 2 <= len(refused) <= 3
    assert str(MAX_WAITING) in refused[0].reason
    found.close(clock.now_s() + 60)
    assert (tmp_path / "ran").read_text().count("x") == MAX_WAITING + 3 - len(refused)


def test_no_hooks_no_threads(tmp_path: Path) -> None:
    before = threading.active_count()
    found = hooks_of(tmp_path)
    found.take(VERDICT)
    assert threading.active_count() <= before  # a command of another test may end just now
    found.close(clock.now_s() + 60)


class Receiver(http.server.BaseHTTPRequestHandler):
    """Answers as the path says; stores the requests."""

    bodies: list[tuple[str, Any]] = []  # noqa: RUF012 - replaced by the fixture
    authorizations: list[str | None] = []  # noqa: RUF012 - replaced by the fixture

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.authorizations.append(self.headers["Authorization"])
        self.bodies.append((self.headers["Content-Type"], json.loads(body)))
        if self.path == "/hang":
            self.server.hanging.wait(60)  # type: ignore[attr-defined]
        code = int(self.path[1:]) if self.path[1:].isdigit() else 204
        self.send_response(code)
        if 300 <= code < 400:
            self.send_header("Location", "file:///etc/passwd" if code == 302 else "/204")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def receiver() -> Iterator[tuple[str, list[tuple[str, Any]]]]:
    Receiver.bodies = []
    Receiver.authorizations = []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Receiver) as server:
        server.hanging = threading.Event()  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}", Receiver.bodies
        server.hanging.set()  # type: ignore[attr-defined]
        server.shutdown()
        thread.join()


def test_webhook(receiver: tuple[str, list[tuple[str, Any]]]) -> None:
    url, bodies = receiver
    assert Webhook(f"{url}/204")(reported()) == ""
    ((content_type, body),) = bodies
    assert content_type == "application/json"
    assert body["number"] == 3
    assert body["text"] == NASTY
    assert Webhook(f"{url}/500")(reported()).startswith("it answered 500")


def test_name_and_password_of_the_address_are_sent_as_a_header(
    receiver: tuple[str, list[tuple[str, Any]]],
) -> None:
    url, bodies = receiver
    with_password = url.replace("://", "://me%40home:s3%2Fcr@t@")
    assert Webhook(f"{with_password}/204")(reported()) == ""
    assert len(bodies) == 1
    assert Receiver.authorizations[-1] == "Basic " + b64encode(b"me@home:s3/cr@t").decode()
    assert Webhook(f"{url}/204")(reported()) == ""
    assert Receiver.authorizations[-1] is None


@pytest.mark.parametrize(
    "url",
    [
        "https://me:s3cret@host:port/x",
        "https://me:s3cret/x@host/x",
        "https://me:s3cret@[host/x",
        "https://me:s3cret@host\uff0f/x",
        "https://host/s3cret with spaces",
    ],
)
def test_an_address_that_is_not_valid_is_not_shown(url: str) -> None:
    msgspec.convert({"webhook": url}, HooksConfig)
    assert Webhook(url)(reported()) == "hooks.webhook is not a valid address"


@pytest.mark.parametrize("code", [301, 302, 307])
def test_redirects_are_not_followed(code: int, receiver: tuple[str, list[tuple[str, Any]]]) -> None:
    url, bodies = receiver
    reason = Webhook(f"{url}/{code}")(reported())
    assert reason.startswith(f"it answered {code}")
    assert len(bodies) == 1


def test_a_webhook_that_hangs_is_left(receiver: tuple[str, list[tuple[str, Any]]]) -> None:
    url, _ = receiver
    webhook = Webhook(f"{url}/hang", limit_s=0.3)
    first = webhook(reported())
    assert "no answer" in first or "timed out" in first


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://x/", "https://", "example.org"])
def test_only_http(url: str) -> None:
    with pytest.raises(msgspec.ValidationError, match="webhook"):
        msgspec.convert({"webhook": url}, HooksConfig)


def test_limits_are_as_documented() -> None:
    assert hooks.COMMAND_S == 30
    assert hooks.WEBHOOK_S == 10
