"""Turns the command line of `ftrun train.py` into a run folder and executes the stub.

It writes `spec.json` in a locked run folder, and calls `execv`. The process id, the terminal and
the standard streams stay; the memory of the command line is freed.
"""

import difflib
import fcntl
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from ftrun import clock, process_tree
from ftrun.cli.launch import profiles
from ftrun.cli.launch.checkpoint_check import check_there, check_writable
from ftrun.cli.launch.command_line import KEY_OF_FLAG, OWN_FLAGS, CommandLine
from ftrun.cli.launch.nodes import nodes_of, rdzv_settings
from ftrun.cli.launch.slurm import SlurmStep, slurm_step
from ftrun.cli.launch.torchrun_flags import CliFlag
from ftrun.cli.runs import SHUTDOWN_S, is_file_of, shut_down_smp, sweep
from ftrun.cli.stub import answers, python_command
from ftrun.config.checks import is_text
from ftrun.config.cluster import NodesSpec
from ftrun.config.profile import FORWARDED_NAMES
from ftrun.config.run_spec import RunSpec
from ftrun.errors import ExitCode, NotSupportedHere, PeerTimeout, RunIdTaken, UsageError
from ftrun.ids import RunId
from ftrun.urls import is_url, located
from ftrun.wire.checkpoint_owner import CheckpointOwner
from ftrun.wire.finished_run import has_finished, read_owner
from ftrun.wire.messages.checkpoint import ATOMS_NAME, INDEX_NAME
from ftrun.wire.run_environment import (
    LOG_FOLDER,
    RunFolder,
    check_run_id,
    run_folder,
    spare_log_folder,
)

_PATHS = ("DIR", "FILE", "PATH")
_FAULT_FLAGS = ("allow-faults", "allow-network-faults")
_LOCK_ATTEMPTS = 100
_POLL_S = 0.05
MAX_TEMPORARY_BYTES = 75  # a socket path has at most 107; multiprocessing adds 32 to the folder
_DEVICE_KINDS = ("auto", "cpu", "gpu", "xpu")


def run(line: CommandLine, *, variables: Mapping[str, str]) -> NoReturn:
    """Starts the run by replacing this process with the stub; a UsageError starts nothing."""
    if sys.platform != "linux":
        raise NotSupportedHere(
            f"ftrun starts runs on Linux only, and this is {sys.platform}. A script that calls "
            "ftrun.attach runs here under plain python, without snapshots"
        )
    spec = build_spec(line, variables=variables)
    check_text(spec)
    check_telemetry(spec)
    owner = check_checkpoint_directory(spec)
    check_resume(spec)
    if finished := has_finished(spec, owner):
        sys.stderr.write(f"ftrun: {finished}\n")
        raise SystemExit(ExitCode.DONE)
    sweep()
    if warning := temporary_folder_warning(tempfile.gettempdir()):
        sys.stderr.write(f"ftrun: {warning}\n")
    folder, lock_fd = take_folder(spec.folder_name, script=spec.script)
    if folder.spec.exists():  # the stub of an earlier start was killed
        for pid in process_tree.end_left_behind(folder.path):
            sys.stderr.write(f"ftrun: {process_tree.explain_stuck(pid)}\n")
    remove_earlier_run(folder, spec, slurm_step(variables))
    spec = with_log_folder(spec, is_given=bool(variables.get(LOG_FOLDER)))
    folder.spec.write_bytes(msgspec.json.format(msgspec.json.encode(spec), indent=1))
    sys.stdout.flush()
    sys.stderr.flush()
    os.set_inheritable(lock_fd, True)
    command = python_command("ftrun.cli.stub", str(folder.path), str(lock_fd))
    # SIGINT stays blocked until the stub can handle it; see Stub._prepare.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    os.execv(command[0], command)


def temporary_folder_warning(folder: str) -> str:
    """Explains why DataLoader workers hang with this temporary folder; empty if they do not."""
    if len(os.fsencode(folder)) <= MAX_TEMPORARY_BYTES:
        return ""
    return (
        f"TMPDIR is {folder}, {len(os.fsencode(folder))} bytes long. Python's multiprocessing "
        f"creates its sockets there. With more than {MAX_TEMPORARY_BYTES} bytes DataLoader workers "
        "fail and their rank waits forever. Set TMPDIR to a shorter path"
    )


def with_log_folder(spec: RunSpec, *, is_given: bool) -> RunSpec:
    """Creates the log folder, or another one with a warning; a UsageError if it `is_given`."""
    folder = Path(spec.log_folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = f"the logs cannot be written to {folder}: {error.strerror or error}"
        if is_given:
            raise UsageError(f"{reason}. Name another folder in {LOG_FOLDER}") from error
        nodes = [] if spec.nodes is None else [spec.nodes.node_id]
        other = spare_log_folder().joinpath(spec.run_id, *nodes)
        sys.stderr.write(f"ftrun: {reason}. They are in {other}\n")
        return msgspec.structs.replace(spec, log_folder=str(other))
    return spec


def build_spec(line: CommandLine, *, variables: Mapping[str, str]) -> RunSpec:
    _check_versions(line)
    check_num_ranks(line, variables)
    script = _find_script(line, variables)
    resolved = resolve_options(line, variables=variables)
    step = slurm_step(variables)
    nodes = nodes_of(line, variables, resolved.profile, step)
    is_shared = nodes is not None and bool(nodes.etcd)
    run_id = _run_id(line, variables, script, _common_name(nodes, step), is_shared=is_shared)
    log_folder = Path(variables.get(LOG_FOLDER) or Path.cwd() / "ftrun-logs").absolute() / run_id
    given = line.torchrun_value("max-restarts")
    source, text = "--max-restarts", given
    for name in ("FTRUN_MAX_RESTARTS", "PET_MAX_RESTARTS"):
        if text is None:
            source, text = name, variables.get(name)
    return RunSpec(
        run_id=run_id,
        script=script,
        torchrun_argv=line.torchrun_argv(),
        max_restarts=None if text is None else _count(text, what=source),
        log_folder=str(log_folder if nodes is None else log_folder / nodes.node_id),
        quiet=_is_on(line, variables, "quiet"),
        debug=_is_on(line, variables, "debug"),
        allow_faults=any(_is_on(line, variables, name) for name in _FAULT_FLAGS),
        allow_network_faults=_is_on(line, variables, "allow-network-faults"),
        cwd=str(Path.cwd()),
        profile=resolved.profile,
        nodes=nodes,
    )


def check_text(spec: RunSpec) -> None:
    """Refuses arguments and folders that cannot be passed to other processes as text."""
    for text in (spec.cwd, *spec.torchrun_argv):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            name = os.fsencode(text).decode(errors="backslashreplace")
            what = "the folder" if text == spec.cwd else "the argument"
            raise UsageError(f"{what} {name} is not UTF-8: rename the file or folder") from error


def check_telemetry(spec: RunSpec) -> None:
    """Refuses a set endpoint without the library. A variable alone is only a warning later."""
    if spec.profile.otel.endpoint is None:
        return
    try:
        is_there = find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    except ModuleNotFoundError:
        is_there = False
    if not is_there:
        raise UsageError(
            f"otel.endpoint is {spec.profile.otel.endpoint}, and opentelemetry is not installed: "
            "pip install 'ftrun[otel]', or leave otel.endpoint out. Nothing was started"
        )


def check_checkpoint_directory(spec: RunSpec) -> CheckpointOwner | None:
    """Tests it by a write; returns the record of the last run that wrote to it."""
    directory = spec.checkpoint_directory
    if directory is None:
        return None
    if is_url(directory):
        return check_writable(directory)
    _check_no_atoms(f"--checkpoint-dir {directory}", Path(directory))
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise UsageError(
            f"--checkpoint-dir {directory} cannot be written: {error.strerror or error}. Name "
            "another one, or make it writable; nothing was started"
        ) from error
    return read_owner(directory)


def check_resume(spec: RunSpec) -> None:
    path = spec.resume_path
    if path is None:
        return
    flag = f"--resume {spec.profile.checkpoint.resume}"
    if not spec.profile.snapshot.enabled:
        raise UsageError(f"{flag} needs snapshots, and --no-snapshots disables them")
    if is_url(path):
        check_there(path)
        return
    found = Path(path)
    if not found.is_dir():
        what = "is a file" if found.exists() else "does not exist"
        raise UsageError(
            f"{flag}: {path} {what}. Name a checkpoint (DIR/step-...), a directory of them, or "
            "auto or never; ftrun checkpoints list DIR lists them"
        )
    _check_no_atoms(flag, found)
    if not (found / INDEX_NAME).exists() and not any(found.glob(f"step-*/{INDEX_NAME}")):
        raise UsageError(
            f"{flag}: there is no checkpoint of ftrun in {path}, neither {INDEX_NAME} nor "
            "step-.../. Nothing was started"
        )


def _check_no_atoms(flag: str, folder: Path) -> None:
    if (folder / ATOMS_NAME).exists():
        raise UsageError(
            f"{flag}: {folder} holds atoms, and a run resumes from a checkpoint. ftrun checkpoints "
            f"load {folder} DIR makes one of them in DIR. Nothing was started"
        )


def resolve_options(line: CommandLine, *, variables: Mapping[str, str]) -> profiles.ResolvedProfile:
    name = line.own_value("profile") or variables.get("FTRUN_PROFILE")
    return profiles.resolve(
        name,
        variables=variables,
        torchrun=rdzv_settings(variables.get("PET_RDZV_CONF"), "PET_RDZV_CONF"),
        flags=settings_of(line),
    )


def settings_of(line: CommandLine) -> list[profiles.SettingValue]:
    """Returns ftrun's own flags as profile keys; `--set` comes first, so that flags override it."""
    found = rdzv_settings(line.torchrun_value("rdzv-conf"), "--rdzv-conf")
    found += [profiles.setting_from_text(text) for text in line.own.get("set", [])]
    for flag in OWN_FLAGS:
        given = line.own.get(flag.name)
        if flag.name in KEY_OF_FLAG and given:
            section, _, key = KEY_OF_FLAG[flag.name].partition(".")
            value = _flag_value(flag, given, profiles.key_type(section, key))
            found.append(profiles.SettingValue(section, key, value, f"--{flag.name}"))
            if flag.name == "checkpoint-every":
                found[-1:] = _checkpoint_every(found[-1], given[-1])
    return found


def _checkpoint_every(seconds: profiles.SettingValue, text: str) -> list[profiles.SettingValue]:
    """Returns the settings of `--checkpoint-every SECONDS` or `Nstep`; the last one given holds."""
    match = re.fullmatch(r"([1-9]\d*) ?steps?", text)
    steps = replace(seconds, key="every_steps", value=int(match[1]) if match else 0)
    return [steps] if match else [seconds, steps]


def _flag_value(flag: CliFlag, given: list[str], wanted: Any) -> object:
    if not flag.takes_value:
        return not flag.name.startswith("no-")
    if flag.is_repeatable:
        return given
    text = given[-1]
    if flag.name == "forward-signals":
        return _signals(text)
    *words, kind = (flag.metavar or "").split("|")
    if kind in _PATHS and text not in words:
        return located(text, cwd=str(Path.cwd()))
    return text if is_text(wanted) else profiles.plain_value(text)


def take_folder(name: str, *, script: str) -> tuple[RunFolder, int]:
    """Locks and returns the run's folder; the returned descriptor holds the lock.

    If the lock is free, the folder belongs to a run whose stub has ended. The new run then takes
    over the folder and the memory that its SMP may still hold. Raises RunIdTaken if the run is
    alive, or if its SMP holds snapshots of another script.
    """
    folder = run_folder(name)
    for attempt in range(_LOCK_ATTEMPTS):
        folder.path.mkdir(mode=0o700, exist_ok=True)
        try:
            lock_fd = os.open(folder.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:  # removed in between by a run that has just ended
            continue
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(lock_fd, 32, 0).decode().strip()
            os.close(lock_fd)
            is_run = owner.isdigit() and Path(f"/proc/{owner}").exists()
            if not is_run and attempt < _LOCK_ATTEMPTS - 1:
                clock.sleep(_POLL_S)  # `sweep` or `ftrun status` holds the lock briefly
                continue
            raise RunIdTaken(
                f"run {folder.name} is alive (pid {owner or 'not known yet'}). Choose another "
                f"--run-id, or see it with: ftrun status {folder.name}"
            ) from None
        if is_file_of(folder.lock, lock_fd):
            break
        os.close(lock_fd)
    else:
        raise RunIdTaken(f"{folder.path} is removed repeatedly by another process; remove it")
    try:
        _check_same_script(folder, script)
    except RunIdTaken:
        os.close(lock_fd)
        raise
    os.ftruncate(lock_fd, 0)
    os.pwrite(lock_fd, f"{os.getpid()}\n".encode(), 0)
    return folder, lock_fd


def remove_earlier_run(folder: RunFolder, spec: RunSpec, step: SlurmStep | None) -> None:
    """Frees the memory that an earlier start of a requeued Slurm job may have left on this node.

    Slurm has ended the earlier start on all nodes, so that usually nothing is left. If only a
    minority of nodes still holds memory, these nodes wait for the others, because they cannot
    decide alone. All nodes of the new start can restore the checkpoint instead. Raises PeerTimeout
    if the memory cannot be freed.
    """
    is_requeued = step is not None and step.restarts > 0
    if not is_requeued or spec.checkpoint_directory is None or not answers(folder.smp_socket):
        return
    give_up_s = clock.now_s() + SHUTDOWN_S
    is_going = shut_down_smp(folder)
    while answers(folder.smp_socket):  # the agent must find no SMP to take over
        if not is_going or clock.now_s() > give_up_s:
            raise PeerTimeout(peer="the SMP of the job's previous start", waited_s=SHUTDOWN_S)
        clock.sleep(_POLL_S)


def _check_same_script(folder: RunFolder, script: str) -> None:
    before = folder.spec_value("script")
    if before not in (None, script) and answers(folder.smp_socket):
        raise RunIdTaken(
            f"run {folder.name} holds snapshots of {before}, and this is {script}. Choose "
            f"another --run-id, or free them with: ftrun stop {folder.name}"
        )


def _check_versions(line: CommandLine) -> None:
    if line.torchrun_value("print-completion") is not None:
        raise UsageError("--print-completion is for torchrun; ftrun's own: ftrun --show-completion")
    newer = [flag for flag, _ in line.torchrun if flag.since > (2, 8)]
    if not newer:
        return
    try:
        text = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return
    match = re.match(r"(\d+)\.(\d+)", text)
    for flag in newer:
        if match and (int(match[1]), int(match[2])) < flag.since:
            since = ".".join(str(part) for part in flag.since)
            raise UsageError(f"--{flag.name} needs torch {since} or newer, and {text} is installed")


def check_num_ranks(line: CommandLine, variables: Mapping[str, str]) -> None:
    """Checks the format only; the number of devices is known after the import of torch."""
    name, text = "--nproc-per-node", line.torchrun_value("nproc-per-node")
    if text is None:
        name, text = "PET_NPROC_PER_NODE", variables.get("PET_NPROC_PER_NODE", "1")
    if text not in _DEVICE_KINDS and not re.fullmatch(r"0*[1-9]\d{0,5}", text):
        raise UsageError(
            f"{name} is a whole number, 1 or more, or {', '.join(_DEVICE_KINDS)}, not {text!r}"
        )


def _find_script(line: CommandLine, variables: Mapping[str, str]) -> str:
    script = line.script
    if script is None:
        raise UsageError("no script is given. For example: ftrun --nproc-per-node 2 train.py")

    def has(name: str) -> bool:
        typed = line.torchrun_value(name)
        return typed is not None or variables.get(f"PET_{name}".upper().replace("-", "_")) == "1"

    if has("no-python"):
        command = shutil.which(script)
        if command is None:
            raise UsageError(f"{script} is not a command that can be run; cwd {Path.cwd()}")
        return str(Path(command).absolute())
    if has("module"):
        top = script.partition(".")[0]
        where = [str(Path.cwd()), *sys.path]
        if not _is_importable(top, where):
            raise UsageError(f"there is no module named {script}; cwd {Path.cwd()}")
        return script
    path = Path(script).absolute()
    if not path.exists():
        names = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, names, n=1)
        hint = f". Did you mean {Path(script).with_name(near[0])}?" if near else ""
        raise UsageError(f"{script} does not exist; cwd {Path.cwd()}{hint}")
    if path.is_dir() and not (path / "__main__.py").is_file():
        raise UsageError(f"{script} is a folder without __main__.py; give a script in it")
    return str(path)


def _is_importable(name: str, where: list[str]) -> bool:
    """Whether there is a module; editable installs have finders of their own."""
    if importlib.machinery.PathFinder.find_spec(name, where) is not None:
        return True
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _run_id(
    line: CommandLine, variables: Mapping[str, str], script: str, common: str | None, *,
    is_shared: bool,
) -> RunId:  # fmt: skip
    """Returns the given run id, or a new one; nodes of one run derive the same id."""
    given = line.own_value("run-id")
    if given is not None:
        return check_run_id(given)
    rendezvous = line.torchrun_value("rdzv-id") or variables.get("PET_RDZV_ID", "none")
    if rendezvous != "none":
        return check_run_id(rendezvous)
    if is_shared and common is None:
        raise UsageError(
            "--rdzv-backend etcd needs a name for the run, the same on all its nodes, because an "
            "etcd may serve many runs. Give --rdzv-id NAME"
        )
    stem = re.sub(r"[^A-Za-z0-9_-]+", "-", Path(script).stem).strip("-_") or "run"
    return check_run_id(f"{stem[:60]}-{common or os.urandom(4).hex()}")


def _common_name(nodes: NodesSpec | None, step: SlurmStep | None) -> str | None:
    """Equal on all nodes of a run. Not the endpoint's host: its own node may say localhost."""
    if nodes is None or (nodes.etcd and step is None):
        return None
    return f"job{step.job_id}-{step.step_id}" if step is not None else f"port{nodes.endpoint_port}"


def _is_on(line: CommandLine, variables: Mapping[str, str], name: str) -> bool:
    text = line.own_value(name) or variables.get(f"FTRUN_{name.upper().replace('-', '_')}", "")
    return text.lower() not in ("", "0", "false", "no")


def _count(text: str, *, what: str) -> int:
    if not re.fullmatch(r"\d+", text):
        raise UsageError(f"{what} is a whole number, 0 or more, not {text!r}")
    return int(text)


def _signals(text: str) -> list[str]:
    names = []
    for word in text.split(",") if text else []:
        name = f"SIG{word.strip().upper().removeprefix('SIG')}"
        if name not in FORWARDED_NAMES:
            raise UsageError(
                f"--forward-signals: {word.strip()!r} cannot be forwarded; possible are "
                f"{', '.join(one.removeprefix('SIG') for one in FORWARDED_NAMES)}"
            )
        names.append(name)
    return names
