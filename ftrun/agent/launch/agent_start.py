"""The first action of an agent: import torch, and fork the zygote.

Runs in:  agent, single-threaded, before it has opened anything.
Takes in: the run folder; descriptors from the stub.
Gives:    a zygote that shares this import of torch. It imports the rest while the agent begins.

Rule 1: in the zygote no object may own a descriptor of the agent's. It could close a later
        descriptor with the same number, in a rank. The fork therefore comes before the agent opens
        anything, and descriptors from the stub are closed here by number.
Rule 2: no module of the agent is imported before the fork, only torch, because ranks must find no
        more in `sys.modules` than the zygote's own modules.
"""

import gc
import glob
import json
import os
import runpy
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftrun.linux import become_subreaper, die_with_parent, name_process, unfit_to_fork
from ftrun.wire.messages.agent_start import (
    RESERVE_SOCKET,
    RETAINED_FDS,
    STUB_PID,
    STUB_SOCKET,
    ZygoteSettings,
    decode_numbers,
)
from ftrun.wire.run_environment import RunFolder

KNOWN_TORCH = ((2, 8), (2, 15))
"""Versions (first, last) whose launcher was read; see docs/internals.md."""

_NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"


@dataclass(frozen=True, slots=True)
class Started:
    """State of an agent when its own program begins."""

    zygote: tuple[socket.socket, int] | None = None
    """Its control socket and its pid; None: none was forked."""
    error: BaseException | None = None
    """For the agent to raise once it can report it: torch cannot be imported, or Ctrl-C."""
    is_forked: bool = False


def begin() -> Started | None:
    """Prepare the agent's own program; None in a fork that has run another program to its end."""
    become_subreaper()
    die_with_parent(int(os.environ.get(STUB_PID, os.getppid())))
    name_process("ftrun-agent")
    is_forked = "torch" in sys.modules
    reserve_fd = int(os.environ.pop(RESERVE_SOCKET, "-1"))
    if reserve_fd >= 0:
        os.set_inheritable(reserve_fd, False)
    try:
        for_zygote = _prepare(RunFolder(Path(sys.argv[1])))
        link = None
        if for_zygote is not None:
            link = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - raised again by the agent
        return Started(error=error)
    if for_zygote is None or link is None:
        if reserve_fd >= 0:
            os.close(reserve_fd)
        return Started(is_forked=is_forked)
    mine, its = link
    agent_pid = os.getpid()
    gc.freeze()  # a collection would write to each object, and so copy the shared pages
    pid = os.fork()
    if pid == 0:
        mine.close()
        _run_zygote(its.detach(), agent_pid, for_zygote, reserve_fd)
        return None
    its.close()
    if reserve_fd >= 0:
        os.close(reserve_fd)
    return Started((mine, pid), is_forked=is_forked)


def set_thread_count(argv: list[str]) -> None:
    """Set OMP_NUM_THREADS as torchrun does in its own process, but early enough for OpenMP."""
    if "OMP_NUM_THREADS" in os.environ:
        return
    value = os.environ.get("PET_NPROC_PER_NODE", "1")
    for word in argv[: argv.index("--")] if "--" in argv else argv:
        if word.startswith("--nproc-per-node="):
            value = word.partition("=")[2]
    if _num_ranks(value) != 1:
        os.environ["OMP_NUM_THREADS"] = "1"


def _num_ranks(word: str) -> int:
    """The number of ranks, as torchrun finds it; 0 if only torch can count the devices."""
    if word.isdigit():
        return int(word)
    gpus = len(glob.glob("/dev/nvidia[0-9]*"))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if gpus and visible is not None:
        gpus = min(gpus, len([one for one in visible.split(",") if one.strip()]))
    is_of_cpus = word == "cpu" or (word == "auto" and not glob.glob("/dev/dri/render*"))
    return gpus or (os.cpu_count() or 1 if is_of_cpus else 0)


def script_folder(script: str, cwd: str) -> str:
    """The first folder of the script's import path: its own, or `cwd` for a module."""
    return os.path.dirname(os.path.realpath(script)) if os.path.isabs(script) else cwd


def unknown_torch(text: str) -> str:
    """Why this version of torch is not forked; empty if it can be forked."""
    found = tuple(int(part) for part in text.split("+")[0].split(".")[:2])
    oldest, newest = KNOWN_TORCH
    if oldest <= found <= newest:
        return ""
    return (
        f"torch {text} is not one of {oldest[0]}.{oldest[1]} to {newest[0]}.{newest[1]}; workers "
        "are started fresh"
    )


def _prepare(folder: RunFolder) -> ZygoteSettings | None:
    """Import torch, with SIGINT unblocked. None: no zygote."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # the stub has blocked it
    try:
        spec = json.loads(folder.spec.read_bytes())
        settings: dict[str, Any] = spec["profile"]["start"]
        if settings["mode"] != "warm":
            return None
        set_thread_count(spec["torchrun_argv"])
        before = os.environ.get(_NVML_CHECK)
        # is_available() must not call cuInit here, because that would break CUDA in every fork.
        os.environ.setdefault(_NVML_CHECK, "1")
        gc.disable()  # collections take a fifth of these imports
        import torch
        import torch.distributed

        if before is None:
            del os.environ[_NVML_CHECK]
        is_fit = not unknown_torch(torch.__version__) and not unfit_to_fork()
        folder_of_script = script_folder(spec["script"], spec["cwd"])
        made = ZygoteSettings.of(folder_of_script, settings, spec["torchrun_argv"])
        return made if is_fit else None
    finally:
        gc.enable()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


def _run_zygote(fd: int, agent_pid: int, settings: ZygoteSettings, reserve_fd: int) -> None:
    for name in (STUB_SOCKET, RETAINED_FDS):
        for stubs_fd in decode_numbers(os.environ.get(name, "")):
            os.close(stubs_fd)
    if reserve_fd >= 0:
        os.environ[RESERVE_SOCKET] = str(reserve_fd)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    sys.argv = ["", str(fd), str(agent_pid), settings.encode()]
    runpy._run_module_as_main("ftrun.worker.process.zygote")  # type: ignore[attr-defined]
