"""`ftrun preflight`: the check that a node runs on itself before it joins a run.

The program that an agent starts for this check makes the measurements.
"""

import os
import subprocess
from contextlib import suppress
from typing import Annotated

import msgspec
import typer

from ftrun.cli.completion import AsJson, option, profile_names
from ftrun.cli.launch.profiles import resolve
from ftrun.cli.screen import terminal as render
from ftrun.cli.screen.text import NOT_KNOWN
from ftrun.cli.stub import python_command
from ftrun.config.profile import PreflightConfig
from ftrun.errors import ExitCode, FtrunError
from ftrun.monitor.node_fitness import (
    NodeFitness,
    NodeMeasurements,
    judge,
    rate_per_s_text,
    size_text,
)

_SLACK = 4.0  # factor on the time limit, because an operator waits longer than a run does
_SPY_FOR = (
    ". Without it a rank that hangs with the interpreter's lock held is called a hang in "
    "computation, not a stuck GIL"
)

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def check(
    profile: Annotated[
        str | None, option("--profile", "whose limits apply", autocompletion=profile_names)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check whether this machine is fit to run ranks."""
    name = profile or os.environ.get("FTRUN_PROFILE") or None
    settings = resolve(name, variables=os.environ).profile.preflight
    found = judge(_measure(settings.timeout_s * _SLACK), settings)
    spy = _spy_fault(settings.timeout_s * _SLACK)
    if spy:
        found = msgspec.structs.replace(found, warnings=(*found.warnings, f"{spy}{_SPY_FOR}"))
    if as_json:
        render.write_json(found)
    else:
        render.show_pairs(_rows(found.figures, settings))
        for line in _verdict(found):
            render.write_plain(line)
    raise typer.Exit(ExitCode.DONE if found.is_fit else ExitCode.FAILED)


def _measure(limit_s: float) -> NodeMeasurements:
    command = python_command("ftrun.agent.observe.preflight", os.getcwd())
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, timeout=limit_s, check=True)
        return msgspec.json.decode(done.stdout, type=NodeMeasurements)
    except subprocess.TimeoutExpired as error:
        raise FtrunError(
            f"the check did not finish within {limit_s:g} s: a disk or a driver hangs, or the "
            "machine is overloaded"
        ) from error
    except (subprocess.CalledProcessError, msgspec.MsgspecError) as error:
        raise FtrunError(f"the check failed: {error}") from error


def _spy_fault(limit_s: float) -> str:
    command = python_command("ftrun.agent.observe.introspection")
    with suppress(subprocess.TimeoutExpired):
        done = subprocess.run(
            command, stdout=subprocess.PIPE, timeout=limit_s, check=False, text=True
        )
        return done.stdout
    return "py-spy did not answer"


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
    return f"{rate_per_s_text(rate)}, at least {rate_per_s_text(least)}" if rate else NOT_KNOWN


def _size(size: int, least: float) -> str:
    return NOT_KNOWN if size < 0 else f"{size_text(size)}, at least {size_text(least)}"


def _count(count: int, least: int) -> str:
    return "no limit" if count < 0 else f"{count:,}, at least {least:,}"


def _verdict(found: NodeFitness) -> list[str]:
    lines = [f"WARNING: {one}" for one in found.warnings]
    lines += [f"NOT FIT: {one}" for one in found.problems]
    return ["", *lines, *(["this machine is fit to run ranks"] if found.is_fit else [])]
