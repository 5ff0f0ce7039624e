"""Plays the flight recorders of ranks, as torch's own server in each rank does.

    python recorder_server.py FOLDER

FOLDER/ranks.json has for each rank: socket, descriptor of the heartbeat page, version of torch, the
backend, and a trace. FOLDER/mode says how requests for traces are answered; FOLDER/asked gets one
line per request. Answers, parameters and formats are those of torch 2.8 to 2.15: the JSON has text
in `pg_status`, 0 for a time that was not seen, and no entries if there are none.

Modes: `hang`: no answer to a request that queries events; `silent`: to no request; `torn`: the
connection ends within the answer; `slow`: a byte now and then; `large`: too many bytes, unless only
active entries are asked for; `odd`: no JSON; `error`: status 500.
"""

import json
import os
import pickle
import sys
import threading
import time
from pathlib import Path
from socketserver import StreamRequestHandler, ThreadingUnixStreamServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from ftrun.wire.shared_memory.pages import HeartbeatField, SharedPage

NCCL = {"dump_nccl_trace_json": "json", "dump_nccl_trace_pickle": "pickle"}
PLAIN = "fr_trace_json"
LARGE_BYTES = (64 << 20) + 1


class Rank(ThreadingUnixStreamServer):
    """The server of one rank."""

    daemon_threads = True

    def __init__(self, folder: Path, about: dict[str, Any]) -> None:
        self.folder, self.about = folder, about
        self.page = SharedPage(about["page"])
        self.version = tuple(int(one) for one in about["torch"].split("."))
        self.log = threading.Lock()
        super().__init__(about["socket"], Answer)

    @property
    def handlers(self) -> list[str]:
        names = ["ping", "dump_traceback", *(NCCL if self.about["backend"] != "gloo" else ())]
        return [*names, PLAIN, "pyspy_dump"] if self.version >= (2, 10) else names

    @property
    def mode(self) -> str:
        return (self.folder / "mode").read_text()

    def note(self, request: str) -> None:
        reading = bool(self.page.get(HeartbeatField.READING_NS))
        with self.log, (self.folder / "asked").open("a") as file:
            file.write(json.dumps([request, reading, self.page.may_capture]) + "\n")


class Answer(StreamRequestHandler):
    """One request, as cpp-httplib answers it."""

    server: Rank

    def handle(self) -> None:
        line = self.rfile.readline().decode()
        while self.rfile.readline().strip():
            pass
        _, target, _ = line.split(" ")
        parts = urlsplit(target)
        name, given = parts.path.removeprefix("/handler/"), dict(parse_qsl(parts.query))
        self.server.note(target.removeprefix("/handler/"))
        mode = self.server.mode
        asks_events = name in NCCL and given.get("includecollectives") != "false"
        while mode == "silent" or (mode == "hang" and asks_events):
            time.sleep(0.01)
            mode = self.server.mode
        if name not in ("", *self.server.handlers):
            return self._send(404, f"Handler {name} not found".encode())
        if not name:
            return self._send(200, json.dumps(self.server.handlers).encode())
        if name not in (*NCCL, PLAIN):
            return self._send(200, b"pong")
        if mode == "error":
            return self._send(500, b"")
        body = self._trace(name, given)
        if body is None:
            return self._send(400, b"Invalid parameters - unexpected param passed in")
        if mode == "large" and given.get("onlyactive") != "true":
            body += b" " * (LARGE_BYTES - len(body))
        return self._send(200, b"?" + body[1:] if mode == "odd" else body, mode)

    def _trace(self, name: str, given: dict[str, str]) -> bytes | None:
        about = self.server.about
        found = dict(about["trace"])
        if name == PLAIN:
            # Before 2.15 it serves gloo only, and ignores its parameters.
            is_own = self.server.version >= (2, 15) and given.get("backend") == about["backend"]
            if about["backend"] != "gloo" and not is_own:
                found = {**found, "entries": [], "pg_status": {}}
            return _as_json(found)
        kind = NCCL[name]
        known = {"includecollectives", "onlyactive", *(["includestacktraces"] * (kind != "json"))}
        if not given.keys() <= known or not set(given.values()) <= {"true", "false"}:
            return None
        if given.get("includecollectives") == "false":
            found.pop("entries", None)
        elif given.get("onlyactive") == "true":
            found["entries"] = [one for one in found["entries"] if one["state"] != "completed"]
        return _as_json(found) if kind == "json" else _as_pickle(found)

    def _send(self, status: int, body: bytes, mode: str = "") -> None:
        head = (
            f"HTTP/1.1 {status} It is\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        words = head.encode() + body
        try:
            if mode == "torn":
                self.wfile.write(words[: len(words) - len(body) // 2 - 1])
            elif mode == "slow":
                for at in range(len(words)):
                    self.wfile.write(words[at : at + 1])
                    time.sleep(0.05)
            else:
                self.wfile.write(words)
        except OSError:
            return  # the agent has closed it


def _as_json(trace: dict[str, Any]) -> bytes:
    """Text for counts, no key without entries; a dump without seen times has 0 for them."""
    found = {key: value for key, value in trace.items() if key != "entries" or value}
    return json.dumps(found).encode()


def _as_pickle(trace: dict[str, Any]) -> bytes:
    """Numbers for counts, and None for times that were not seen."""
    found = dict(trace)
    found["pg_status"] = {
        number: {key: int(value) for key, value in one.items()}
        for number, one in trace["pg_status"].items()
    }
    times = ("time_discovered_started_ns", "time_discovered_completed_ns")
    if "entries" in trace:
        found["entries"] = [
            {key: value or None if key in times else value for key, value in one.items()}
            for one in trace["entries"]
        ]
    return pickle.dumps(found, protocol=2)


def main() -> None:
    folder = Path(sys.argv[1])
    for about in json.loads((folder / "ranks.json").read_text()):
        threading.Thread(target=Rank(folder, about).serve_forever, args=(0.02,)).start()
    print("ready", flush=True)
    sys.stdin.read()  # until the test ends
    os._exit(0)


if __name__ == "__main__":
    main()
