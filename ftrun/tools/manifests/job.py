"""Derives from a command line the facts that every scheduler needs.

Runs in:  cli. Pure; it does not read the environment or the script, because both are on another
          machine.
Takes in: the words for `ftrun`, and the resources of a node.
Gives:    a `ManifestJob`: numbers of nodes and ranks, memory, duration of a stop; parsers of sizes
          and times.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

from ftrun.cli.launch.command_line import CommandLine, parse
from ftrun.cli.launch.nodes import OUR_BACKENDS, num_nodes
from ftrun.cli.run import check_num_ranks, resolve_options
from ftrun.config.profile import Profile
from ftrun.erasure.groups import default_parity, make_groups
from ftrun.errors import UsageError
from ftrun.urls import is_url

MIB, GIB = 1 << 20, 1 << 30

OWN_BYTES = GIB
"""For the zygote with torch, the agent and the SMP; forked processes share this memory."""

_WRITE_BYTES_PER_S = 200e6
_SPARE_S = 10
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([KMGT]i?)?B?")
_UNITS = {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNITS |= {f"{unit}i": 1 << 10 * (place + 1) for place, unit in enumerate("KMGT")}
_SPAN = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_SPAN_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_CLOCK = re.compile(r"(?:(\d+)-)?(\d+):(\d{2}):(\d{2})")
_OF_ONE_NODE = ("node-rank", "node-id", "bind", "local-addr")
_WHERE_THEY_MEET = ("rdzv-endpoint", "master-addr", "master-port")


@dataclass(frozen=True, slots=True)
class MachineSpec:
    """Resources of a node as typed; None if not given."""

    cpus: int | None = None
    gpus: int | None = None
    memory: str | None = None
    """Memory of the training on a node, without snapshots; all ranks together."""

    state: str | None = None
    """Snapshot size of one rank: parameters, optimizer state, buffers."""


@dataclass(frozen=True, slots=True)
class ManifestJob:
    """A run as a scheduler sees it."""

    line: CommandLine
    flags: tuple[str, ...]
    """ftrun's flags as typed, and a longer --grace if the last checkpoint needs it."""

    script: tuple[str, ...]
    """The script and its arguments as typed; includes a `--` before the script."""

    profile: Profile
    name: str | None
    least: int
    most: int
    """Nodes that train; `least` is smaller only with --nnodes MIN:MAX."""

    spares: int
    ranks: int
    """Per node."""

    machine: MachineSpec
    grace_s: float
    """From the stop signal until ranks are killed; the last checkpoint may take as long again."""

    time_s: int | None

    @property
    def nodes(self) -> int:
        """Number of nodes that are started, including spares."""
        return self.most + self.spares

    @property
    def in_words(self) -> str:
        trains = f"{self.least} to {self.most}" if self.least < self.most else str(self.most)
        nodes = "1 node trains" if self.most == 1 else f"{trains} nodes train"
        spares = f", {self.spares} more {_plural(self.spares, 'stands', 'stand')} by"
        ranks = f"{self.ranks} {_plural(self.ranks, 'rank', 'ranks')}"
        each = ranks if self.most == 1 else f"{ranks} on each"
        return f"{nodes}{spares if self.spares else ''}; {each}"

    @property
    def ending_s(self) -> int:
        """Seconds from the stop signal until the run has ended, including the last checkpoint."""
        return math.ceil(2 * self.grace_s) + _SPARE_S

    @property
    def checkpoint_directory(self) -> str | None:
        return self.line.own_value("checkpoint-dir") or self.profile.checkpoint.directory

    @property
    def shared_directory(self) -> str | None:
        """The checkpoint directory; None if there are no checkpoints or if they go to a URL."""
        directory = self.checkpoint_directory
        return None if directory is None or is_url(directory) else directory

    @property
    def stem(self) -> str:
        return PurePath(self.line.script or "").stem

    @property
    def snapshot_bytes(self) -> int | None:
        """Memory of a node for snapshots; None if the size of the state was not given."""
        if self.machine.state is None:
            return None
        state = size_of(self.machine.state, "--state")
        if not self.profile.snapshot.enabled:
            return 0
        # Two slots for each rank, and parity as in docs/many-nodes.md.
        return math.ceil(2 * state * self.ranks * (1 + self._parity_part()))

    def memory_bytes(self, shm_bytes: int = 0) -> int | None:
        """Total memory of a node; None if the memory of the training was not given."""
        if self.machine.memory is None:
            return None
        own = size_of(self.machine.memory, "--memory")
        return own + (self.snapshot_bytes or 0) + shm_bytes + OWN_BYTES

    def memory_in_words(self, shm_bytes: int = 0) -> str:
        parts = [f"{self.machine.memory} of the training"]
        if self.snapshot_bytes is None:
            parts.append("nothing for snapshots, as --state was not given")
        elif self.snapshot_bytes:
            parts.append(f"{quantity(self.snapshot_bytes)} of snapshots")
        parts += [f"{quantity(shm_bytes)} of /dev/shm"] if shm_bytes else []
        return ", ".join([*parts, f"{quantity(OWN_BYTES)} of ftrun"])

    def refuse(self, names: Sequence[str], why: str) -> None:
        """Raises a UsageError if one of these flags was given."""
        for name in names:
            is_own = self.line.own_value(name) is not None
            if is_own or self.line.torchrun_value(name) is not None:
                raise UsageError(f"--{name} is {why}. Leave it out")

    def _parity_part(self) -> float:
        """Parity memory of a node relative to its state: the largest M/K of all groups."""
        data, parity = self.profile.erasure.data_and_parity
        chosen = default_parity(self.most) if parity is None else parity
        groups = make_groups([str(node) for node in range(self.most)], data=data, parity=chosen)
        return max(one.parity / one.data if one.is_protected else 0.0 for one in groups)


def job_of(
    words: Sequence[str],
    *,
    machine: MachineSpec,
    name: str | None = None,
    time: str | None = None,
    last_checkpoint: str | None = None,
) -> ManifestJob:
    """Derives the job without access to the machine that will run it.

    Raises:
        UsageError: input that `ftrun` or a scheduler would refuse.
    """
    line = parse(words)
    if line.script is None:
        raise UsageError(
            "no script is given. What ftrun would be given stands behind --, such as: "
            "ftrun render slurm -- --nnodes 4 --nproc-per-node 8 train.py"
        )
    for word in words:
        if any(0xD800 <= ord(letter) < 0xE000 or letter == "\0" for letter in word):
            raise UsageError(f"{word!r} is not UTF-8, and a file of text cannot hold it")
    profile = resolve_options(line, variables={}).profile
    least, most, spares = num_nodes(line, {})
    ranks = _num_ranks(line, machine)
    grace_s = _grace_s(line, profile, _writing_s(last_checkpoint, machine, ranks))
    flags = tuple(words[: len(words) - len(line.tail)])
    if grace_s > profile.stop.grace_s:
        flags = ("--grace", str(math.ceil(grace_s)), *flags)
    job = ManifestJob(
        line=line,
        flags=flags,
        script=tuple(line.tail),
        profile=profile,
        name=name,
        least=least,
        most=most,
        spares=spares,
        ranks=ranks,
        machine=machine,
        grace_s=grace_s,
        time_s=None if time is None else seconds_of(time, "--time"),
    )
    job.refuse(_OF_ONE_NODE, "of one node, and the same line is run on all")
    if (line.torchrun_value("rdzv-backend") or "") in OUR_BACKENDS:
        job.refuse(_WHERE_THEY_MEET, "known where a scheduler starts the nodes")
    return job


def size_of(text: str, what: str) -> int:
    """Parses `64Gi`, `16G`, `512MiB` or a number of bytes; rounded up to bytes.

    Raises:
        UsageError: the text has none of these forms, or the size is out of range.
    """
    match = _SIZE.fullmatch(text.strip())
    found = float(match[1]) * _UNITS.get(match[2] or "", 1) if match else 0.0
    if not 1 <= found < 1 << 60:
        raise UsageError(f"{what} is a size such as 64Gi, 512Mi or 16G, not {text!r}")
    return math.ceil(found)


def seconds_of(text: str, what: str) -> int:
    """Parses `90m`, `24h`, `7d`, `HH:MM:SS` or `D-HH:MM:SS`; rounded up to seconds.

    Raises:
        UsageError: the text has none of these forms, or the time is out of range.
    """
    found = 0.0
    if match := _SPAN.fullmatch(text.strip()):
        found = float(match[1]) * _SPAN_S[match[2]]
    elif match := _CLOCK.fullmatch(text.strip()):
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        found = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if not 0 < found < 1 << 31:
        raise UsageError(f"{what} is a time such as 90m, 24h, 7d or 12:00:00, not {text!r}")
    return math.ceil(found)


def quantity(num_bytes: int) -> str:
    """Formats a size as Kubernetes does, rounded up: `12Gi`, `1500Mi`."""
    mib = -(-num_bytes // MIB)
    return f"{mib // 1024}Gi" if mib % 1024 == 0 else f"{mib}Mi"


def _plural(count: int, one: str, many: str) -> str:
    return one if count == 1 else many


def _num_ranks(line: CommandLine, machine: MachineSpec) -> int:
    check_num_ranks(line, {})
    text = line.torchrun_value("nproc-per-node") or "1"
    if text.isdecimal():
        return int(text)
    known = {"gpu": ("--gpus", machine.gpus), "cpu": ("--cpus", machine.cpus)}
    known["auto"] = known["xpu"] = known["gpu"]
    flag, count = known[text]
    if not count:
        raise UsageError(
            f"--nproc-per-node {text} is known only on the node. Say how many it has, with "
            f"{flag} N before --, or give --nproc-per-node a number"
        )
    return count


def _writing_s(given: str | None, machine: MachineSpec, ranks: int) -> float:
    """Seconds in which a node writes its part of a checkpoint; 0 if unknown."""
    if given is not None:
        return float(seconds_of(given, "--last-checkpoint"))
    state = size_of(machine.state, "--state") if machine.state is not None else 0
    return state * ranks / _WRITE_BYTES_PER_S


def _grace_s(line: CommandLine, profile: Profile, writing_s: float) -> float:
    """Returns the run's grace, lengthened for a slow checkpoint unless --grace is given."""
    given = line.own_value("grace")
    if given is not None and profile.stop.grace_s < writing_s:
        raise UsageError(
            f"--grace {given} lets the last checkpoint take {given} s, and it takes "
            f"{math.ceil(writing_s)} s. Give a longer --grace, or say how long it takes, with "
            "--last-checkpoint"
        )
    return max(profile.stop.grace_s, float(math.ceil(writing_s)))
