"""Reads a rank's flight recorder: the collectives that it has called and has not finished.

Runs in:  agent, the thread of the rank observer.
Takes in: the unix socket of torch's worker server in the rank. Its C++ thread answers even if the
          rank hangs while it holds the GIL.
Gives:    `RecordedCollective`s, the oldest first.
Source:   handler `fr_trace_json`; read in torch 2.13, where 64 entries take 1 ms. With gloo an
          entry has no start and no end, only `retired` after its end.
"""

import socket
from contextlib import closing
from pathlib import Path

import msgspec

from ftrun.wire.transport.channel import short_socket_path

ANSWER_S = 1.0
MAX_ANSWER_BYTES = 64 << 20
_REQUEST = (
    b"POST /handler/fr_trace_json HTTP/1.1\r\nHost: rank\r\nContent-Length: 0\r\n"
    b"Connection: close\r\n\r\n"
)


class RecordedCollective(msgspec.Struct, frozen=True):
    """One collective as this rank has called it."""

    process_group: tuple[str, str]
    """Name and description of the group."""
    collective_seq_id: int
    profiling_name: str
    """For example `gloo:all_reduce`."""
    time_created_ns: int
    """When it was called, on the wall clock."""
    retired: bool
    """It has ended on this rank."""
    is_p2p: bool = False
    input_sizes: list[list[int]] = []
    record_id: int = 0

    @property
    def group(self) -> str:
        return self.process_group[0]

    @property
    def op(self) -> str:
        return self.profiling_name.rpartition(":")[2]

    @property
    def sizes(self) -> str:
        shown = " ".join(str(sizes) if sizes else "scalar" for sizes in self.input_sizes[:4])
        return shown + (" ..." if len(self.input_sizes) > 4 else "")


class _Trace(msgspec.Struct):
    entries: list[RecordedCollective] = []


_decoder = msgspec.json.Decoder(_Trace)


def read_entries(path: str, *, deadline_s: float = ANSWER_S) -> list[RecordedCollective] | None:
    """All entries of a rank; None if it does not answer.

    Args:
        path: of the rank's socket.
        deadline_s: for each step of the exchange.
    """
    try:
        with closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as link:
            link.settimeout(deadline_s)
            with short_socket_path(Path(path)) as short:
                link.connect(short)
            link.sendall(_REQUEST)
            answer = _read_all(link)
        head, _, body = answer.partition(b"\r\n\r\n")
    except OSError:
        return None
    return parse_entries(body) if b" 200 " in head[:32] else None


def parse_entries(trace: bytes) -> list[RecordedCollective] | None:
    try:
        return _decoder.decode(trace).entries
    except msgspec.DecodeError:
        return None


def _read_all(link: socket.socket) -> bytes:
    parts, size = [], 0
    while size < MAX_ANSWER_BYTES and (part := link.recv(1 << 18)):
        parts.append(part)
        size += len(part)
    return b"".join(parts)
