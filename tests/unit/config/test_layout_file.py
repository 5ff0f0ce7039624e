"""A layout is a file, or one that is packaged, with its values filled in."""

from pathlib import Path

import pytest

from ftrun.config.layout_file import PACKAGED, layout_text
from ftrun.errors import UsageError
from ftrun.sharding.rule_parser import read_rules

TEXT = "# values: layers tp=2\nmesh: {tp: $tp}\nunique: [{name: 'l.{n}', axis: tp, of: $layers}]\n"


def test_a_file_without_values_is_read_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("mesh: {tp: 2}\nreplicate: [$w]\n")
    assert layout_text(str(path)) == path.read_text()
    with pytest.raises(UsageError, match=r"layers is not a value of .*x\.yaml; it has none"):
        layout_text(f"{path}:layers=3")
    with pytest.raises(FileNotFoundError):
        layout_text(str(tmp_path / "none.yaml"))


def test_values_replace_words_and_defaults_are_used(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(TEXT)
    rules = read_rules(layout_text(f"{path}:layers=12"), source="x")
    assert (rules.mesh.size, rules.placements[0].count) == (2, 12)
    assert read_rules(layout_text(f"{path}:layers=12,tp=3"), source="x").mesh.size == 3
    with pytest.raises(UsageError, match=r"needs layers: give .*x\.yaml:layers=\.\.\."):
        layout_text(str(path))
    with pytest.raises(UsageError, match=r"pp is not a value of .*; it has layers, tp"):
        layout_text(f"{path}:layers=12,pp=3")


def test_a_line_for_one_value_is_left_out_for_another(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("# values: a=1\none # only a=1\n$a # only a=2\n")
    assert "a=2" not in layout_text(str(path))
    assert layout_text(f"{path}:a=2") == "# values: a=1\n2 # only a=2"


def test_values_that_do_not_go_together_are_refused_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("# values: tp=1 etp=? cp=1\n"
                    "# require: etp=$tp unless cp=7 (say etp)\nmesh: {tp: $tp}\n")  # fmt: skip
    with pytest.raises(UsageError, match=r"etp=\? is not supported; it must be 2: say etp"):
        layout_text(f"{path}:tp=2")
    assert "mesh: {tp: 2}" in layout_text(f"{path}:tp=2,etp=2")
    assert "mesh: {tp: 2}" in layout_text(f"{path}:tp=2,etp=9,cp=7")


@pytest.mark.parametrize(
    ("values", "reported"),
    [
        ("tp=2,cp=2", "cp=2 is not supported; it must be 1: ranks along context parallelism"),
        ("tp=2,experts=8,ep=2", r"etp=\? is not supported; it must be 2: with experts, say etp"),
        ("tp=2,experts=8,ep=2,etp=1", "etp=1 is not supported; it must be 2"),
    ],
)
def test_megatron_meshes_that_its_layout_does_not_describe(values: str, reported: str) -> None:
    with pytest.raises(UsageError, match=reported):
        layout_text(f"megatron-core:layers=2,vocab=10,fc1=2,{values}")
    layout_text("megatron-core:layers=2,vocab=10,fc1=2,tp=2,experts=8,ep=2,etp=2")


def test_a_path_is_taken_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "x:a=1"
    path.write_text("# values: b\nmesh: {dp: 1} # only b=1\n")
    assert layout_text(str(path)) == path.read_text()


def test_a_packaged_layout_has_a_name_unless_a_file_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="layout megatron-core needs layers, vocab, fc1:"):
        layout_text("megatron-core")
    Path("megatron-core").write_text("mesh: {dp: 1}")
    assert layout_text("megatron-core") == "mesh: {dp: 1}"
    with pytest.raises(FileNotFoundError):
        layout_text("no-such-layout")


@pytest.mark.parametrize("path", sorted(PACKAGED.glob("*.yaml")), ids=lambda path: path.stem)
def test_packaged_layouts_are_valid(path: Path) -> None:
    needed = {"layers": "4", "vocab": "100", "fc1": "1"}
    words = ",".join(f"{key}={value}" for key, value in needed.items())
    text = layout_text(f"{path.stem}:{words}")
    assert "$" not in text
    read_rules(text, source=path.stem)
