"""How the checks of check_gpu.py start processes, each within the time of its check."""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench_common import Deadline, NotesReader, ftrun_command, launched

WORKER = Path(__file__).with_name("check_gpu_worker.py")
STOP_S = 25.0
"""A check that does not end at its limit has this time to end its processes."""

Figures = dict[str, Any]
Lines = list[dict[str, Any]]


class Check:
    """One check: its folder, its time, and how it starts processes there."""

    def __init__(self, args: argparse.Namespace, folder: Path, limit_s: float) -> None:
        self.args, self.folder = args, folder
        self.is_gpu = args.device == "cuda"
        self.limit_s = limit_s
        self.deadline = Deadline(limit_s)
        self._end_s = time.monotonic() + limit_s

    def run_id(self, part: str = "") -> str:
        return f"{self.folder.name}{part}-{os.getpid()}"

    def plain(self, what: str, *more: object, part: str = "") -> list[object]:
        folder = self.folder / part
        folder.mkdir(parents=True, exist_ok=True)
        words = [WORKER, what, "--folder", folder, "--device", self.args.device]
        return [sys.executable, *words, *more]

    def ftrun(
        self,
        what: str,
        *more: object,
        part: str = "",
        ranks: int = 1,
        every: object = 1,
        settings: Sequence[str] = (),
    ) -> list[object]:
        """A worker under ftrun.

        Args:
            what: the part of the worker.
            more: its other arguments.
            part: folder of its files.
            ranks: their number.
            every: steps between two snapshots, or `auto`.
            settings: `KEY=VALUE` of the profile.
        """
        flags = ["--nproc-per-node", ranks, "--run-id", self.run_id(part)]
        flags += ["--snapshot-every", every]
        for setting in settings:
            flags += ["--set", setting]
        if self.args.device == "fake":  # torch knows it before a fork, as it knows a GPU
            flags += ["--preload", "fake_device.preloaded"]
        return [*ftrun_command(*flags), *self.plain(what, *more, part=part)[1:]]

    def run(self, command: Sequence[object], part: str = "", **more: str) -> str:
        """Run a command to its end; empty, or its last output if it failed.

        Args:
            command: its words.
            part: folder of its files.
            more: variables of the environment.
        """
        folder = self.folder / part
        variables = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/c"}
        variables |= more
        left_s = self._end_s - time.monotonic()
        if left_s <= 0:
            return "not started: the time of this check is over"
        with launched("check", command, folder, self.deadline, **variables) as launcher:
            try:
                code: object = launcher.process.wait(left_s)
            except subprocess.TimeoutExpired:
                code = f"none after {left_s:.0f} s"
            return f"exit code {code}: {launcher.last_output()[-700:]}" if code else ""

    def lines(self, kind: str | None = None, part: str = "", rank: int = 0) -> Lines:
        lines = NotesReader(self.folder / part / f"rank{rank}.jsonl").read()
        return [line for line in lines if kind in (None, line["kind"])]

    def found(self, kind: str, part: str = "") -> Figures:
        """All figures that a worker wrote before its end."""
        return {key: one for line in self.lines(kind, part) for key, one in line["found"].items()}
