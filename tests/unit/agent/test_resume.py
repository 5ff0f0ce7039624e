"""Where a generation looks for a checkpoint: its own first, what others left only with auto."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from ftrun.agent.snapshots.resume import CheckpointSource, sources_of
from ftrun.config.profile import Profile
from ftrun.config.run_spec import RunSpec

LIFE = "1f2e3d"


def spec(place: Path, *, resume: str, directory: str | None = "saved") -> RunSpec:
    profile = Profile()
    wish = {"directory": directory, "resume": resume}
    checkpoint = replace(profile.checkpoint, **wish)
    return RunSpec(
        run_id="r",
        script="train.py",
        torchrun_argv=["train.py"],
        max_restarts=None,
        log_folder=str(place / "logs"),
        cwd=str(place),
        profile=replace(profile, checkpoint=checkpoint),
    )


def test_auto_takes_whatever_is_there(tmp_path: Path) -> None:
    (found,) = sources_of(spec(tmp_path, resume="auto"), LIFE, has_committed=True)
    assert found == CheckpointSource(str(tmp_path / "saved"))
    assert not sources_of(spec(tmp_path, resume="auto", directory=None), LIFE, has_committed=False)


def test_never_takes_what_the_run_has_written(tmp_path: Path) -> None:
    (found,) = sources_of(spec(tmp_path, resume="never"), LIFE, has_committed=False)
    assert found == CheckpointSource(str(tmp_path / "saved"), life=LIFE)
    assert "this run has written no checkpoint" in found.why_none


def test_a_path_comes_after_what_the_run_has_written(tmp_path: Path) -> None:
    old = tmp_path / "old" / "step-00000003-g0"
    old.mkdir(parents=True)
    own = CheckpointSource(str(tmp_path / "saved"), life=LIFE)
    found = sources_of(spec(tmp_path, resume="old"), LIFE, has_committed=True)
    assert found == [own, CheckpointSource(str(tmp_path / "old"))]
    (old / "index.json").touch()
    (tmp_path / "old" / "latest").symlink_to(old.name)
    for wish in ("old/latest", "old/step-00000003-g0/"):
        found = sources_of(spec(tmp_path, resume=wish), LIFE, has_committed=True)
        assert found == [own, CheckpointSource(str(tmp_path / "old"), only=old.name)]


@pytest.mark.parametrize("has_committed", [False, True])
def test_without_a_directory_a_path_is_only_where_the_run_begins(
    tmp_path: Path, has_committed: bool
) -> None:
    wanted = spec(tmp_path, resume="old", directory=None)
    found = sources_of(wanted, LIFE, has_committed=has_committed)
    assert found == ([] if has_committed else [CheckpointSource(str(tmp_path / "old"))])


def test_a_url_says_by_its_last_part_whether_it_is_one_checkpoint(tmp_path: Path) -> None:
    for wish, found in (
        ("ftp://me:pw@h/run", CheckpointSource("ftp://me:pw@h/run")),
        ("ftp://me:pw@h/run/latest", CheckpointSource("ftp://me:pw@h/run", only="latest")),
        (
            "s3://b/r/step-00000003-g0-0-1/",
            CheckpointSource("s3://b/r", only="step-00000003-g0-0-1"),
        ),
    ):
        wanted = spec(tmp_path, resume=wish, directory="gs://b/own")
        assert sources_of(wanted, LIFE, has_committed=True) == [
            CheckpointSource("gs://b/own", life=LIFE),
            found,
        ]
    assert "pw" not in CheckpointSource("ftp://me:pw@h/run").why_none
