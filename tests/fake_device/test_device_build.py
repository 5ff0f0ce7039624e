"""The fake device is compiled once, anywhere, and by any number of processes."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from fake_device import device_build as building
from fake_device.device_build import CompilerMissing, library, search_path

ROOT = Path(__file__).parents[2]
ON_DEVICE = ROOT / "tests" / "fake_device" / "on_device" / "test_waits.py"
BUILD = "import sys; from pathlib import Path; from fake_device.device_build import library; "
BUILD += "print(library(Path(sys.argv[1])))"


@pytest.mark.slow
@pytest.mark.full
def test_two_processes_build_one_library_below_a_long_path_with_a_blank(tmp_path: Path) -> None:
    cache = tmp_path / "a path with a blank" / ("x" * 150)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", BUILD, str(cache)],
            env=os.environ | {"PYTHONPATH": search_path()},
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    found = {process.communicate()[0].strip() for process in processes}
    (path,) = found
    assert sorted(one.name for one in cache.iterdir()) == sorted(["lock", Path(path).name])


def test_another_source_is_another_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = building._key()
    (tmp_path / "streams.cpp").write_text("// other")
    monkeypatch.setattr(building, "SOURCES", tmp_path)
    assert building._key() != before


def test_a_missing_compiler_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "COMPILER", "no-such-compiler")
    with pytest.raises(CompilerMissing, match="no-such-compiler"):
        library(tmp_path)


@pytest.mark.slow
def test_tests_without_a_compiler_are_skipped_and_fail_scripts_test(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    words = ["-q", "-p", "no:cacheprovider", f"--junitxml={report}", str(ON_DEVICE)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words],
        cwd=ROOT,
        env=os.environ | {"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    wrong = runpy.run_path(str(ROOT / "scripts" / "test"))["forbidden_skips"](report)
    assert wrong
    assert all("g++ is not installed" in one for one in wrong)


def test_a_failed_build_leaves_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources, cache = tmp_path / "sources", tmp_path / "cache"
    sources.mkdir()
    (sources / "wrong.cpp").write_text("#error wrong on purpose\n")
    monkeypatch.setattr(building, "SOURCES", sources)
    with pytest.raises(RuntimeError, match="wrong on purpose"):
        library(cache)
    assert [one.name for one in cache.iterdir()] == ["lock"]
