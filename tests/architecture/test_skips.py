"""`scripts/test` distinguishes a test that may be skipped here from one that should have run."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "test"

WHOLE_MODULE = """
import pytest
pytest.skip("{reason}", allow_module_level=True)
"""
ONE_TEST = """
import pytest
@pytest.mark.skipif(True, reason="{reason}")
def test_something(): pass
"""
EXPECTED_TO_FAIL = """
import pytest
@pytest.mark.xfail(reason="{reason}")
def test_something(): assert False
"""


@pytest.mark.parametrize("source", [WHOLE_MODULE, ONE_TEST], ids=["module", "test"])
@pytest.mark.parametrize(
    ("reason", "is_allowed"), [("needs Slurm: not installed", True), ("no time today", False)]
)
def test_by_its_reason(tmp_path: Path, source: str, reason: str, is_allowed: bool) -> None:
    found = forbidden(tmp_path, source.format(reason=reason))
    assert not found if is_allowed else reason in " ".join(found)


def test_what_is_expected_to_fail_has_run(tmp_path: Path) -> None:
    assert not forbidden(tmp_path, EXPECTED_TO_FAIL.format(reason="a known bug of torch"))


def forbidden(folder: Path, source: str) -> list[str]:
    (folder / "test_it.py").write_text(source)
    report = folder / "report.xml"
    words = ["-q", "-p", "no:cacheprovider", f"--junitxml={report}", "test_it.py"]
    subprocess.run(
        [sys.executable, "-m", "pytest", *words], cwd=folder, capture_output=True, check=False
    )
    found = runpy.run_path(str(SCRIPT))["forbidden_skips"](report)
    assert isinstance(found, list)
    return found
