"""scripts/test and scripts/demo pass in any checkout: 150 characters, a blank, no ASCII, no root.

The first creates the environment, as after a fresh clone, and runs every step of scripts/test. That
takes about 20 minutes on two quiet cores, so scripts/test runs this file alone, after all others.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LENGTH = 150
NOBODY = 65534
PASSED_ON = ("PIP_", "SSL_", "REQUESTS_", "HTTP_", "HTTPS_", "NO_PROXY", "LANG", "LC_")
LIMIT_S, STOP_S = 3400.0, 60.0

pytestmark = [pytest.mark.full, pytest.mark.slow, pytest.mark.timeout(3600)]

Do = Callable[..., None]


@pytest.fixture(scope="module")
def do() -> Iterator[Do]:
    """Run a program of the checkout, in it, as a user without root rights."""
    with tempfile.TemporaryDirectory(prefix="ftrun-c-") as text:
        folder = Path(text)
        checkout = folder / "a checkout with a blänk"
        checkout /= "x" * (LENGTH - len(str(checkout)) - 1)
        assert len(str(checkout)) == LENGTH
        home, temporary = folder / "home", folder / "tmp"
        for path in (checkout.parent, home, temporary):
            path.mkdir()
        subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", ROOT, checkout], check=True)
        settings = Path.home() / ".config" / "pip"  # the package index that it uses
        if settings.is_dir():
            shutil.copytree(settings, home / ".config" / "pip")
        variables = {k: v for k, v in os.environ.items() if k.upper().startswith(PASSED_ON)}
        variables |= {"PATH": _path(), "HOME": str(home), "TMPDIR": str(temporary)}
        as_user = {}
        if os.geteuid() == 0:
            as_user = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
            _give(folder)

        def run(*words: str) -> None:
            with tempfile.TemporaryFile("w+", errors="replace") as output:
                process = subprocess.Popen(
                    [*words], cwd=checkout, env=variables, stdin=subprocess.DEVNULL,
                    stdout=output, stderr=subprocess.STDOUT, start_new_session=True, **as_user,
                )  # fmt: skip
                try:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(LIMIT_S)
                finally:
                    _end(process)
                output.seek(0)
                assert process.returncode == 0, output.read()[-20_000:]

        yield run


def _end(process: subprocess.Popen[bytes]) -> None:
    """End it with all its child processes, if it still runs; by ^C, so that tests clean up."""
    for number in (signal.SIGINT, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)


def _path() -> str:
    """Folders of programs that every user may enter, with a python3 in the first."""
    if os.geteuid() != 0:
        return os.environ["PATH"]
    found = [sys.base_exec_prefix + "/bin", "/usr/local/bin", "/usr/bin", "/bin"]
    return os.pathsep.join(path for path in found if _is_open(Path(path)))


def _is_open(folder: Path) -> bool:
    return all(path.is_dir() and path.stat().st_mode & 1 for path in (folder, *folder.parents))


def _give(folder: Path) -> None:
    for path in (folder, *folder.rglob("*")):
        os.chown(path, NOBODY, NOBODY, follow_symlinks=False)


def test_scripts_test(do: Do) -> None:
    do("scripts/test")


def test_scripts_demo(do: Do) -> None:
    do("scripts/demo", "--steps", "60")
