"""Tests of the folder `on_device` run in a process of their own, one per file.

A process with the fake device keeps it, and torch chooses it as the accelerator. The process of all
other tests must therefore not load it. The reports of each test come back whole.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_device.device_build import CompilerMissing, library, search_path

FOLDER = Path(__file__).parent / "on_device"
REPORTS = "FAKE_DEVICE_REPORTS"
LIMIT_S = 900
_STASH = pytest.StashKey[dict[Path, dict[str, list[Any]]]]()


@pytest.fixture(scope="module")
def compiled() -> Iterator[None]:
    """The device, for the processes that the tests of a module start."""
    try:
        library()
    except CompilerMissing as error:
        pytest.skip(str(error))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", search_path())
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    if item.path.parent != FOLDER or REPORTS in os.environ:
        return None
    found = item.session.stash.setdefault(_STASH, {})
    if item.path not in found:
        items = [one for one in item.session.items if one.path == item.path]
        found[item.path] = _reports_of(item.config, items)
    hook = item.ihook
    hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in found[item.path][item.nodeid]:
        hook.pytest_runtest_logreport(report=report)
    hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if path := os.environ.get(REPORTS):
        config = _config[0]
        data = config.hook.pytest_report_to_serializable(config=config, report=report)
        with Path(path).open("a") as file:
            file.write(json.dumps(data) + "\n")


_config: list[pytest.Config] = []


def pytest_configure(config: pytest.Config) -> None:
    if REPORTS in os.environ:
        from fake_device import fake

        _config.append(config)
        fake.load()


def _reports_of(config: pytest.Config, items: list[pytest.Item]) -> dict[str, list[Any]]:
    try:
        library()
    except CompilerMissing as error:
        return {one.nodeid: [_report(one, "skipped", str(error))] for one in items}
    with tempfile.TemporaryDirectory() as folder:
        reports = Path(folder) / "reports"
        ended = _run(config, [one.nodeid for one in items], reports, Path(folder))
        lines = reports.read_text().splitlines() if reports.exists() else []
    found: dict[str, list[Any]] = {one.nodeid: [] for one in items}
    for line in lines:
        report = config.hook.pytest_report_from_serializable(config=config, data=json.loads(line))
        found[report.nodeid].append(report)
    for one in items:
        if not any(report.when == "teardown" for report in found[one.nodeid]):
            found[one.nodeid].append(_report(one, "failed", ended))
    return found


def _run(config: pytest.Config, names: list[str], reports: Path, folder: Path) -> str:
    """Run these tests; how the process ended."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    variables = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "COV_"))}
    variables |= {"PYTHONPATH": search_path(), REPORTS: str(reports)}
    output = folder / "output"
    with output.open("wb") as file:
        process = subprocess.Popen(
            [*command, *names], cwd=config.rootpath, env=variables, stdin=subprocess.DEVNULL,
            stdout=file, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            ended = f"exit code {process.wait(LIMIT_S)}"
        except subprocess.TimeoutExpired:
            ended = f"no end within {LIMIT_S} s"
        finally:
            process.kill()
            process.wait()
    return (
        f"the process with the fake device: {ended}\n{output.read_text(errors='replace')[-6000:]}"
    )


def _report(item: pytest.Item, outcome: Any, text: str) -> pytest.TestReport:
    path, line, _ = item.location
    reason: Any = (path, line or 0, text) if outcome == "skipped" else text
    return pytest.TestReport(item.nodeid, item.location, {}, outcome, reason, "call")
