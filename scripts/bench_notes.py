"""The records that the benchmarks' workers write during the measurement.

Separate from bench_common.py, whose imports would be part of the measurement.
"""

import argparse
import json
import os
import socket
import time
from pathlib import Path


class Notes:
    """A worker's own file: one JSON line for each record, written completely or not at all."""

    def __init__(self, path: Path) -> None:
        # One write of O_APPEND per line: a kill leaves no half of one.
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def write(self, kind: str, **fields: object) -> None:
        line = {"ns": time.monotonic_ns(), "kind": kind, **fields}
        os.write(self._fd, json.dumps(line).encode() + b"\n")

    def write_begun(self, generation: int) -> None:
        node = socket.gethostname()
        self.write("begun", generation=generation, pid=os.getpid(), node=node)


def arguments(doc: str | None, **kinds: type) -> argparse.Namespace:
    """The folder of a worker's file, and other arguments, all of them required."""
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--folder", type=Path, required=True)
    for name, kind in kinds.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, required=True)
    return parser.parse_args()
