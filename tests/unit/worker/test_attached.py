"""A declared layout fits the existing ranks, and is distinguished from another one."""

from pathlib import Path

import pytest

from ftrun.errors import RulesInvalid, UsageError
from ftrun.sharding.rule_parser import carried, read_carried
from ftrun.worker.state.attached import declared, is_layout_of

TEXT = "mesh: {dp: 2, tp: 2}\nshard:\n  - {name: model.w, axis: tp, dim: 0}\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "rules.yaml"
    found.write_text(TEXT)
    return found


def test_the_axis_of_batches_is_made_to_fit(path: Path) -> None:
    assert str(declared(path, None, None).mesh) == "dp 2, tp 2"
    assert str(declared(path, None, 6).mesh) == "dp 3, tp 2"
    assert str(declared(path, {"tp": 3}, 6).mesh) == "dp 2, tp 3"


def test_what_a_snapshot_carries_is_the_same_layout_and_no_other(path: Path) -> None:
    one = declared(path, {"tp": 1}, 2)
    assert read_carried(carried(one)).layout == one.layout
    assert is_layout_of(one, carried(one))
    assert is_layout_of(one, None)
    assert not is_layout_of(one, carried(declared(path, {"tp": 2}, 2)))
    path.write_text(f"# the same\n{TEXT}")
    assert is_layout_of(one, carried(declared(path, {"tp": 1}, 2)))


@pytest.mark.parametrize(
    ("mesh", "size", "reported"),
    [({"pp": 2}, 4, "mesh has pp"), (None, 3, "a mesh of 4 ranks")],
)
def test_a_mesh_that_cannot_be_is_reported(
    path: Path, mesh: dict[str, int] | None, size: int, reported: str
) -> None:
    with pytest.raises(UsageError, match=reported):
        declared(path, mesh, size)


def test_a_file_that_cannot_be_read_is_reported(path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        declared(path.with_name("none"), None, 4)
    path.write_text("mesh: {tp: 2")
    with pytest.raises(RulesInvalid):
        declared(path, None, 4)


def test_a_mesh_alone_reports_ranks_with_the_same_data() -> None:
    found = declared(None, {"pp": 2, "dp_replicate": 2, "dp_shard": 3, "tp": 2}, 24)
    assert found.is_empty
    assert found.mesh.batch_axes == ("dp_replicate", "dp_shard")
    assert found.mesh.has_stages
    assert is_layout_of(found, carried(found))
    assert not declared(None, {"pp": 1, "dp": 2}, 2).mesh.has_stages
    with pytest.raises(UsageError, match="must be at least 1"):
        declared(None, {"dp": 0}, 2)
    with pytest.raises(UsageError, match="mesh has a mesh of 4 ranks"):
        declared(None, {"tp": 4}, 3)
