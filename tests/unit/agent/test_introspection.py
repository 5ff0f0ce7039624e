"""`ftrun preflight` on py-spy, without which a stuck GIL looks like a hang in computation."""

import subprocess
import sys

import pytest

from ftrun.agent.observe import introspection as stacks
from ftrun.cli.commands import preflight as check

WAIT_S = 600.0


def test_a_missing_py_spy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    monkeypatch.setenv("PATH", "/nowhere")
    assert stacks.spy_fault() == "py-spy is not installed (pip install py-spy)"


def test_check_reports_what_py_spy_can_do_here() -> None:
    found = check._spy_fault(WAIT_S)
    child = subprocess.Popen(["sleep", "600"])
    try:
        may_trace = subprocess.run(
            [stacks.spy_program() or "py-spy", "dump", "--pid", str(child.pid)],
            capture_output=True,
            text=True,
            check=False,
            timeout=WAIT_S,
        )
    finally:
        child.kill()
        child.wait()
    is_forbidden = "Permission denied" in may_trace.stderr
    assert found == "" if not is_forbidden else "py-spy may not read other processes here" in found
