"""A node that starts after the run has finished ends with the run's result."""

from pathlib import Path

import msgspec
import pytest

from ftrun.cli.launch.command_line import parse
from ftrun.cli.run import build_spec, run
from ftrun.config.run_spec import RunSpec
from ftrun.wire.checkpoint_owner import OWNER_NAME, CheckpointOwner, encode_owner
from ftrun.wire.finished_run import has_finished, read_owner
from ftrun.wire.messages.checkpoint import INDEX_NAME

WORDS = "--nnodes 2 --rdzv-endpoint 10.0.0.1:29400 --node-id b --run-id job7 --checkpoint-dir saved"
SCRIPT = "train.py --steps 9"


def spec(words: str = WORDS, script: str = SCRIPT) -> RunSpec:
    return build_spec(parse(f"{words} {script}".split()), variables={})


@pytest.fixture
def owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CheckpointOwner:
    """The directory of a run that has finished and kept a checkpoint."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    kept = tmp_path / "saved" / "step-00000009-g0" / INDEX_NAME
    kept.parent.mkdir(parents=True)
    kept.touch()
    made = CheckpointOwner(
        run_id="job7",
        life="1",
        node="a",
        pid=1,
        machine="",
        num_nodes=2,
        since_s=1.0,
        renewed_s=2.0,
        heartbeat=3,
        runs=["job7"],
        ended_s=4.0,
        exit_code=0,
        command=spec().command_digest,
    )
    (tmp_path / "saved" / OWNER_NAME).write_bytes(encode_owner(made))
    return made


def test_a_late_node_ends_with_the_result_before_anything_is_started(
    owner: CheckpointOwner, capsys: pytest.CaptureFixture[str]
) -> None:
    assert read_owner(str(Path("saved").absolute())) == owner
    with pytest.raises(SystemExit) as ended:
        run(parse(f"{WORDS} {SCRIPT}".split()), variables={})
    assert ended.value.code == 0
    assert "run job7 finished at 1970-01-01 00:00:04 UTC" in capsys.readouterr().err


@pytest.mark.parametrize(
    "changes",
    [{"ended_s": 0.0}, {"exit_code": 93}, {"run_id": "job8"}, {"command": "another"}],
    ids=str,
)
def test_what_has_not_finished_or_is_another_run_is_started(
    owner: CheckpointOwner, changes: dict[str, object]
) -> None:
    assert has_finished(spec(), owner)
    assert not has_finished(spec(), msgspec.structs.replace(owner, **changes))
    assert not has_finished(spec(), None)


def test_a_run_that_is_to_restart_is_started(owner: CheckpointOwner, tmp_path: Path) -> None:
    assert not has_finished(spec(f"{WORDS} --resume never"), owner)
    assert not has_finished(spec(script="train.py --steps 10"), owner)
    assert not has_finished(spec("--run-id job7 --checkpoint-dir saved"), owner), "one node"
    unnamed = spec(WORDS.replace("--run-id job7 ", ""))
    same = msgspec.structs.replace(owner, run_id=unnamed.run_id)
    assert not has_finished(unnamed, same), "the next run there has the same name"
    (tmp_path / "saved" / "step-00000009-g0" / INDEX_NAME).unlink()
    assert not has_finished(spec(), owner), "its checkpoints were removed"


def test_a_node_that_was_part_of_the_run_knows_its_result_by_the_life_of_the_run(
    owner: CheckpointOwner,
) -> None:
    other = spec(script="train.py --steps 10")
    assert "job7 finished" in has_finished(other, owner, life="1")
    assert has_finished(other, owner, life="2") == ""
    failed = msgspec.structs.replace(owner, exit_code=76)
    assert has_finished(other, failed, life="1") == ""
