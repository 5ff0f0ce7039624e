"""Implements `ftrun check`: the check that a node runs on itself before it joins a run.

Runs in: cli. The program that an agent starts for this check makes the measurements.
"""

import json
import os
import subprocess
import sys
from contextlib import suppress

import msgspec

from ftrun.cli.launch.profiles import resolve
from ftrun.cli.screen import terminal as render
from ftrun.config.profile import PreflightConfig
from ftrun.errors import FtrunError
from ftrun.monitor.node_fitness import (
    NodeFitness,
    NodeMeasurements,
    judge,
    rate_in_words,
    size_in_words,
)

_SLACK = 4.0
"""Factor on the time limit, because an operator waits longer than a run does."""

_UNKNOWN = "not known"
_SPY_FOR = (
    ". Without it a rank that hangs with the interpreter's lock held is called a hang in "
    "computation, not a stuck GIL"
)


def check(profile: str | None, *, as_json: bool) -> int:
    """Measures this machine, judges it and prints the result.

    Args:
        profile: the profile whose limits apply; None for the default profile.
        as_json: print one JSON document instead of a table.

    Returns:
        The exit code: 0 if the machine is fit, 1 if not.

    Raises:
        FtrunError: the check itself failed.
    """
    settings = resolve(profile, variables=os.environ).profile.preflight
    found = judge(_measure(settings.limit_s * _SLACK), settings)
    spy = _spy_fault(settings.limit_s * _SLACK)
    if spy:
        found = msgspec.structs.replace(found, warnings=(*found.warnings, f"{spy}{_SPY_FOR}"))
    if as_json:
        render.write_plain(json.dumps(msgspec.to_builtins(found), indent=1))
    else:
        render.show_pairs(_rows(found.figures, settings))
        for line in _verdict(found):
            render.write_plain(line)
    return 0 if found.is_fit else 1


def _measure(limit_s: float) -> NodeMeasurements:
    safe_path = ["-P"] if sys.flags.safe_path else []
    command = [sys.executable, *safe_path, "-m", "ftrun.agent.observe.preflight", os.getcwd()]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, timeout=limit_s, check=True)
        return msgspec.json.decode(done.stdout, type=NodeMeasurements)
    except subprocess.TimeoutExpired as error:
        raise FtrunError(
            f"the check was not done within {limit_s:g} s: a disk or a driver hangs, or the "
            "machine is overloaded"
        ) from error
    except (subprocess.CalledProcessError, msgspec.MsgspecError) as error:
        raise FtrunError(f"the check could not be made: {error}") from error


def _spy_fault(limit_s: float) -> str:
    safe_path = ["-P"] if sys.flags.safe_path else []
    command = [sys.executable, *safe_path, "-m", "ftrun.agent.observe.introspection"]
    with suppress(subprocess.TimeoutExpired):
        done = subprocess.run(
            command, stdout=subprocess.PIPE, timeout=limit_s, check=False, text=True
        )
        return done.stdout
    return "py-spy has not answered"


def _rows(has: NodeMeasurements, least: PreflightConfig) -> list[tuple[str, str]]:
    return [
        ("memory copied", _rate(has.memory_bytes_per_s, least.min_memory_gb_s * 1e9)),
        ("loopback", _rate(has.loopback_bytes_per_s, least.min_loopback_mb_s * 1e6)),
        ("loopback round trip", f"{has.loopback_rtt_s * 1e6:.0f} us"),
        ("free memory", _size(has.free_memory_bytes, least.min_free_memory_mb * 1e6)),
        ("free disk here", _size(has.free_disk_bytes, least.min_free_disk_mb * 1e6)),
        ("open files", _count(has.open_files, least.min_open_files)),
        ("more processes", _count(has.processes, least.min_processes)),
        ("clock", has.clock or "sane"),
        ("GPUs", str(has.gpus) if has.gpus else "none, or no nvidia-ml-py"),
        ("took", f"{has.took_s:.2f} s"),
    ]


def _rate(rate: float, least: float) -> str:
    return f"{rate_in_words(rate)}, at least {rate_in_words(least)}" if rate else _UNKNOWN


def _size(size: int, least: float) -> str:
    return _UNKNOWN if size < 0 else f"{size_in_words(size)}, at least {size_in_words(least)}"


def _count(count: int, least: int) -> str:
    return "no limit" if count < 0 else f"{count:,}, at least {least:,}"


def _verdict(found: NodeFitness) -> list[str]:
    lines = [f"WARNING: {one}" for one in found.warnings]
    lines += [f"NOT FIT: {one}" for one in found.problems]
    if found.is_fit:
        lines.append("this machine is fit to run ranks")
    return ["", *lines]
