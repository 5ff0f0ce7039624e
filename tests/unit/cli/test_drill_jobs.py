"""The jobs of a drill: long enough for its faults, of this ftrun, with a clear error otherwise."""

import json
from pathlib import Path

import pytest

from ftrun.errors import FtrunError
from ftrun.tools.drill import environments as drill_places
from ftrun.tools.drill.environments import environment, load_script
from ftrun.tools.drill.jobs import DrillJob, job_for, steps_for
from ftrun.tools.drill.plan import plan_from, trials_of


def steps(plan: dict[str, object]) -> int:
    part = plan_from(plan, "").parts()[0]
    return steps_for(part, list(trials_of(part)))


def test_steps_are_enough_for_every_fault_and_whole_epochs() -> None:
    one = steps({"faults": [{"kind": "segv"}]})
    many = steps({"faults": [{"kind": "segv", "repeat": 10}]})
    persistent = steps({"pace": 0.05, "faults": [{"kind": "cpu-starve", "for": "10s"}]})
    assert one % 10 == many % 10 == 0
    assert many - one >= 9 * 45
    assert persistent - one >= 190
    assert steps({"faults": [{"kind": "poison-batch", "step": 500}]}) >= one + 490


def test_newest_step_is_found_in_a_file_that_is_being_written(tmp_path: Path) -> None:
    job = DrillJob("ddp", ("train.py", "--folder", "FOLDER"), ("rank0.jsonl",), 100)
    (path,) = job.note_files(tmp_path)
    assert job.last_step(path) == -1
    lines = [json.dumps({"kind": "step", "step": step, "loss": "0x1p0"}) for step in range(500)]
    path.write_text("\n".join(lines) + '\n{"kind": "step", "st')
    assert job.last_step(path) == 499
    assert job.words(tmp_path) == ["train.py", "--folder", str(tmp_path)]


def test_script_of_the_user_that_is_not_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    part = plan_from({"script": "train.py", "faults": [{"kind": "segv"}]}, "").parts()[0]
    with pytest.raises(FtrunError, match=r"train\.py: there is no such script"):
        job_for(part, 10)
    (tmp_path / "train.py").touch()
    job = job_for(part, 10)
    assert (job.argv, job.notes, job.steps) == ((str(tmp_path / "train.py"),), (), 0)


def test_a_run_that_a_drill_is_in_is_not_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FTRUN_SNAPSHOT_EVERY", "7")
    monkeypatch.setenv("PET_NNODES", "4")
    found = environment({"MORE": "1"})
    assert not {"FTRUN_SNAPSHOT_EVERY", "PET_NNODES"} & set(found)
    assert (found["MORE"], found["OMP_NUM_THREADS"]) == ("1", "1")


def test_an_installation_without_the_scripts_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drill_places, "scripts_folder", lambda: tmp_path)
    with pytest.raises(FtrunError, match=r"a drill on 3 nodes is not possible .*nowhere\.py is"):
        load_script("nowhere", "a drill on 3 nodes")
    (tmp_path / "needs_more.py").write_text("import a_package_that_is_not_installed\n")
    with pytest.raises(FtrunError, match="the package a_package_that_is_not_installed is missing"):
        load_script("needs_more", "a drill on 3 nodes")
