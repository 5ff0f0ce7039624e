"""Atoms: one file for each parameter and each value of its state, from any layout and for any.

Checkpoints are real files, as in `test_convert`; the last test trains with FSDP2.
"""

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch

from ftrun.tools.checkpoints.atoms import make
from ftrun.tools.checkpoints.convert import convert as converted
from ftrun.wire.messages.checkpoint import ExportReport
from tests.integration.conftest import Run
from tests.integration.documented import rule_file
from tests.integration.test_convert import (
    LARGE,
    World,
    arrays_of,
    assert_ranks,
    chunks,
    flipped,
    large,
    numbers,
    plain_of,
    rows,
)
from tests.integration.test_export import SCRIPT, check_same


def made(*words: str) -> ExportReport:
    found = make(words)
    assert found.problem == ""
    return found


def refused(*words: str) -> tuple[int, str]:
    found = make(words)
    assert found.problem
    return found.exit_code, found.problem


def loaded(*words: str) -> Path:
    found = converted(["--load", *words])
    assert found.problem == ""
    return Path(found.path)


def tree(folder: str) -> dict[str, bytes]:
    paths = sorted(path for path in Path(folder).rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def tree_names(folder: str) -> list[Path]:
    return [path for path in Path(folder).rglob("*") if path.is_file()]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("zero.yaml", "stages.yaml"):
        Path(name).write_text(rule_file(name))
    Path("large.yaml").write_text(LARGE)
    return tmp_path


@pytest.fixture(scope="module")
def refusing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint and its atoms, which no test changes."""
    folder = tmp_path_factory.mktemp("refusing")
    World(folder / "old", large(2, 2))
    (folder / "large.yaml").write_text(LARGE)
    words = (folder / "old", folder / "atoms", "--rules", folder / "large.yaml")
    made("export", *map(str, words))
    return folder


def test_a_flat_buffer_becomes_whole_tensors_without_padding(here: Path) -> None:
    World(here / "old", rows(3, 2))
    found = made("export", "old", "atoms", "--rules", "zero.yaml")
    assert sorted(found.files) == [
        f"model.{name}/{value}.safetensors"
        for name in ("bias", "up")
        for value in ("fp32", "mean", "optimizer.params[0][0].fp32", "optimizer.params[0][0].mean",
                      "step")
    ] + ["optimizer.params[0][0]/step.safetensors"]  # fmt: skip
    for name in found.files:
        tensors = safetensors.numpy.load_file(f"atoms/{name}")
        assert len(tensors) == 1, name
        assert next(iter(tensors.values())).dtype == np.float32
    (up,) = safetensors.numpy.load_file("atoms/model.up/fp32.safetensors").values()
    assert np.array_equal(up, numbers(10, 6))
    (master,) = safetensors.numpy.load_file(
        "atoms/model.up/optimizer.params[0][0].mean.safetensors"
    ).values()
    assert np.array_equal(master, -numbers(10, 6))
    for data, tensor in ((2, 1), (4, 3)):
        words = ("--rules", "zero.yaml", "--mesh", f"dp={data},tp={tensor}")
        assert_ranks(arrays_of(loaded(*words, "atoms", f"new-{data}")), rows(data, tensor))


def test_the_operations_one_by_one_give_the_same_bytes(here: Path) -> None:
    World(here / "old", rows(3, 2))
    made("export", "old", "atoms", "--rules", "zero.yaml")
    parts = made("extract", "old", "parts", "--rules", "zero.yaml")
    row = [name for name in parts.files if name.startswith("optimizer.params[0][0]/fp32")]
    assert row == [f"optimizer.params[0][0]/fp32.{at}-of-6.safetensors" for at in range(6)]
    made("union", "parts", "padded")
    joined = safetensors.numpy.load_file("padded/optimizer.params[0][0]/fp32.0-of-2.safetensors")
    assert next(iter(joined.values())).shape == (36,)  # 30 of up and 5 of bias, and one of padding
    made("strip", "padded", "stripped")
    assert tree("stripped") == tree("atoms")


def test_any_number_of_workers_and_of_hosts_gives_the_same_bytes(here: Path) -> None:
    World(here / "old", large(2, 2))
    made("export", "old", "one", "--rules", "large.yaml", "--workers", "1")
    made("export", "old", "many", "--rules", "large.yaml", "--workers", "7")
    assert tree("many") == tree("one")
    notes = []
    for number in (2, 3, 1):
        words = ("--rules", "large.yaml", "--share", f"{number}/3")
        found = made("export", "old", "shared", *words)
        notes.append(found.notes[-1])
        assert (here / "shared").exists() == (number == 1)
        assert 0 < len(found.files) < len(tree("one")) - 2
    assert "complete when shares 1, 3 are written, of 3" in notes[0]
    assert "complete when share 1 is written, of 3" in notes[1]
    assert tree("shared") == tree("one")
    assert [path.name for path in here.glob(".*")] == []
    words = ("export", "old", "shared", "--rules", "large.yaml", "--share", "1/3")
    assert made(*words).files == found.files  # repeated after the join
    World(here / "old", large(1, 2))
    Path("large.yaml").write_text(LARGE.replace("dp: 2, tp: 2", "dp: 1, tp: 2"))
    assert "shared exists already, and is of another checkpoint" in refused(*words)[1]
    assert tree("shared") == tree("one")


def test_several_processes_that_end_together_join_their_shares_once(here: Path) -> None:
    World(here / "old", large(2, 2))
    made("export", "old", "one", "--rules", "large.yaml")
    module = "ftrun.tools.checkpoints.atoms"
    running = [
        subprocess.Popen(
            [sys.executable, "-m", module, "export", "old", "shared", "--rules", "large.yaml",
             "--share", f"{number}/4"],
            stdout=subprocess.PIPE,
        )
        for number in range(1, 5)
    ]  # fmt: skip
    for one in running:
        out, _ = one.communicate(timeout=60)
        assert json.loads(out)["problem"] == ""
    assert tree("shared") == tree("one")


def test_a_share_that_was_killed_is_written_again(here: Path) -> None:
    World(here / "old", large(2, 2))
    made("export", "old", "one", "--rules", "large.yaml")
    words = ("export", "old", "shared", "--rules", "large.yaml")
    made(*words, "--share", "1/2")
    command = [sys.executable, "-m", "ftrun.tools.checkpoints.atoms", *words, "--share", "2/2"]
    (folder,) = map(str, here.glob(".shared.shares-*"))
    before = len(tree(folder))
    running = subprocess.Popen([*command, "--workers", "1"], stdout=subprocess.DEVNULL)
    while len(tree_names(folder)) == before and running.poll() is None:
        pass
    running.kill()
    running.wait()
    if not (here / "shared" / "atoms.json").exists():  # else it was faster than the kill
        made(*words, "--share", "2/2")
    assert tree("shared") == tree("one")


def test_shares_of_two_checkpoints_are_not_joined(here: Path) -> None:
    World(here / "old", large(2, 2))
    World(here / "other", large(1, 2))
    first = ("export", "old", "out", "--rules", "large.yaml", "--share")
    made(*first, "1/2")
    Path("less.yaml").write_text(LARGE.replace("dp: 2, tp: 2", "dp: 1, tp: 2"))
    words = ("out", "--rules", "less.yaml", "--share", "2/2")
    assert "complete when share 1 is written" in made("export", "other", *words).notes[-1]
    code, problem = refused("strip", "out", "new")
    assert (code, "lacks shares" in problem) == (77, True)
    made(*first, "2/2")
    made("export", "old", "whole", "--rules", "large.yaml")
    assert tree("out") == tree("whole")


def test_shares_are_not_added_to_a_folder_of_others(here: Path) -> None:
    World(here / "old", large(2, 2))
    (here / "out").mkdir()
    (here / "out" / "mine").touch()
    words = ("export", "old", "out", "--rules", "large.yaml", "--share", "1/1")
    for share in ("1/1", "1/2"):
        assert "out exists already" in refused(*words[:-1], share)[1]
    assert list(tree("out")) == ["mine"]


def test_a_kill_after_the_rename_leaves_a_store_that_a_repeated_share_cleans(here: Path) -> None:
    World(here / "old", large(2, 2))
    made("export", "old", "one", "--rules", "large.yaml")
    words = ("export", "old", "out", "--rules", "large.yaml", "--share")
    for number in (1, 2):
        made(*words, f"{number}/2")
    left = (Path("out/share-1-of-2.json"), Path("out/model.norm/.fp32.safetensors.abcd"))
    for path in left:
        path.touch()
    Path("out/model.norm/.mine").touch()
    made(*words, "2/2")
    Path("out/model.norm/.mine").unlink()
    assert tree("out") == tree("one")


def test_layers_of_stages_have_global_numbers_and_load_into_other_stages(here: Path) -> None:
    World(here / "old", chunks(2, 2, [3, 2]))
    found = made("export", "old", "atoms", "--rules", "stages.yaml")
    assert "model.chunks.0.layers.4.up/fp32.safetensors" in found.files
    text = rule_file("stages.yaml").replace("pp: 2, tp: 2", "pp: 3, tp: 1")
    Path("to.yaml").write_text(text)
    new = loaded("--rules", "to.yaml", "atoms", "new")
    assert_ranks(arrays_of(new), chunks(3, 1, [2, 2, 1]))
    for rank, held in enumerate(chunks(3, 1, [2, 2, 1])):
        state = plain_of(new, rank)["optimizer_state"]["optimizer"]["state"]
        assert set(state) == set(held)


def test_copies_that_diverged_become_their_mean_and_the_note_names_them(here: Path) -> None:
    counts = [np.array([rank], np.int64) for rank in range(2)]
    held = [{"model.w": numbers(4, start=3 * r), "model.count": counts[r]} for r in range(2)]
    World(here / "old", held)
    Path("average.yaml").write_text(rule_file("average.yaml"))
    found = made("export", "old", "atoms", "--rules", "average.yaml")
    assert "each rank has its own model.count: those of the first rank" in found.notes
    assert any("copies have diverged of model.w, " in note for note in found.notes)
    made("extract", "old", "parts", "--rules", "average.yaml")
    made("union", "parts", "padded")
    made("strip", "padded", "stripped")
    assert tree("stripped") == tree("atoms")
    new = arrays_of(loaded("--rules", "average.yaml", "--ranks", "3", "atoms", "new"))
    mean = (held[0]["model.w"] + held[1]["model.w"]) / 2
    assert_ranks(new, [{"model.w": mean, "model.count": counts[0]}] * 3)


def test_half_precision_is_widened_and_comes_back_bit_for_bit(here: Path) -> None:
    bits = np.array([0x3F80, 0xC2F7, 0x0001, 0x7F80, 0x8000, 0x4049], np.uint16)
    held = [{"model.w": part} for part in np.split(bits, 2)]
    World(here / "old", held)
    Path("x.yaml").write_text("mesh: {tp: 2}\nshard: [{name: model.w, axis: tp, dim: 0}]")
    made("export", "old", "atoms", "--rules", "x.yaml")
    (atom,) = safetensors.torch.load_file("atoms/model.w/fp32.safetensors").values()
    assert torch.equal(atom, torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).float())
    new = loaded("--rules", "x.yaml", "--mesh", "tp=3", "atoms", "new")
    assert_ranks(arrays_of(new), [{"model.w": part} for part in np.split(bits, 3)])
    (wide,) = arrays_of(loaded("--dtype", "f64", "atoms", "wide"))
    assert wide["model.w"].dtype == np.float64


@pytest.mark.parametrize("name", ["model.wide/fp32", "model.norm/mean"])
def test_a_damaged_atom_is_not_loaded(here: Path, name: str) -> None:
    World(here / "old", large(2, 2))
    made("export", "old", "atoms", "--rules", "large.yaml")
    path = here / "atoms" / f"{name}.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    found = converted(["--load", "atoms", "new"])
    assert found.exit_code == 77
    assert f"{name}.safetensors" in found.problem
    path.write_bytes(data[:-3])
    assert "ends too early: 3 bytes" in converted(["--load", "atoms", "new"]).problem
    path.unlink()
    assert "is not readable" in converted(["--load", "atoms", "new"]).problem
    assert not list(here.glob("new/step-*"))


def test_a_damaged_checkpoint_and_ranks_that_differ_make_no_atoms(here: Path) -> None:
    flipped(World(here / "old", large(2, 2)), "model.wide", 1)
    code, problem = refused("export", "old", "atoms", "--rules", "large.yaml")
    assert (code, "digest" in problem) == (77, True)
    ranks = large(2, 2)
    ranks[3]["model.norm"] = ranks[3]["model.norm"] + 1
    World(here / "other", ranks)
    code, problem = refused("export", "other", "atoms", "--rules", "large.yaml")
    assert (code, "ranks 0 and 3" in problem) == (2, True)
    assert not (here / "atoms").exists()
    assert not list(here.glob(".atoms*"))


@pytest.mark.parametrize(
    ("words", "reported"),
    [
        (("export", "old", "atoms"), "atoms exists already"),
        (("export", "old", "new"), "it declares no layout rules: give them by --rules FILE"),
        (("union", "old", "new"), "union takes the folder that extract makes"),
        (("strip", "atoms", "new"), "strip takes the folder that union makes, and .* is atoms"),
        (("extract", "atoms", "new"), "extract takes a checkpoint, and .* is atoms"),
        (("export", "old", "new", "--share", "3/2"), "--share is I/N"),
        (("export", "old", "new", "--share", "1/2", "--force"), "remove the folder first"),
        (("export", "old", "new", "--workers", "-1"), "at least 1"),
        (("export", "none", "new"), "neither a checkpoint nor a directory"),
        (("export", "old", "new", "--rules", "none.yaml"), "none.yaml: No such file"),
    ],
)
def test_what_makes_no_sense_is_refused(
    here: Path, refusing: Path, words: Sequence[str], reported: str
) -> None:
    for name in ("old", "atoms"):
        (here / name).symlink_to(refusing / name)
    assert re.search(reported, refused(*words)[1])
    assert not (here / "new").exists()


def test_without_a_link_the_newest_checkpoint_is_taken(here: Path) -> None:
    World(here / "old", large(2, 2))
    (here / "old" / "latest").unlink()
    assert "step-00000042" in made("export", "old", "atoms", "--rules", "large.yaml").checkpoint


def test_force_replaces_atoms_and_nothing_else(here: Path) -> None:
    World(here / "old", large(2, 2))
    words = ("export", "old", "atoms", "--rules", "large.yaml", "--force")
    made(*words)
    (here / "atoms" / "model.norm" / "fp32.safetensors").unlink()
    made(*words)
    assert (here / "atoms" / "model.norm" / "fp32.safetensors").exists()
    for damaged in ("atoms.json", "values.msgpack"):
        (here / "atoms" / damaged).write_bytes(b"{}")
        made(*words)
    (here / "atoms" / "mine").touch()
    assert "files that no export wrote (mine)" in refused(*words)[1]


def ftrun(*words: str, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "ftrun", "checkpoints", *words],
        capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip
    assert done.returncode == code, (done.stdout, done.stderr)
    return done.stdout + done.stderr


def test_the_commands(here: Path) -> None:
    World(here / "old", rows(3, 2))
    said = ftrun("export", "old", "atoms", "--format", "atoms", "--rules", "zero.yaml")
    assert "step 42 as atoms, 11 tensors" in said
    assert "random states are those of rank 0" in said
    said = ftrun("load", "atoms", "new", "--rules", "zero.yaml", "--mesh", "dp=1,tp=2")
    assert "a checkpoint of 2 ranks" in said
    assert_ranks(arrays_of(here / "new" / "latest"), rows(1, 2))
    assert "load takes atoms" in ftrun("load", "old", "x", "--rules", "zero.yaml", code=2)
    for flag in ("--only", "--file-size"):
        assert f"{flag} is not for atoms" in ftrun(
            "export", "old", "x", "--format", "atoms", flag, "1GB", code=2
        )
    assert "--rules and --share are for" in ftrun(
        "export", "old", "x", "--format", "dcp", "--share", "1/2", code=2
    )


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_a_training_resumes_from_atoms_on_another_number_of_ranks(here: Path, kind: str) -> None:
    def trained(ranks: int, folder: str) -> dict[str, Any]:
        words = ("--nproc-per-node", str(ranks), "--checkpoint-dir", folder, str(SCRIPT), kind)
        run = Run(here, *words, str(here), env={"OMP_NUM_THREADS": "1"})
        try:
            assert run.wait() == 0, run.text
        finally:
            run.end()
        return dict(torch.load(here / f"whole-{kind}.pt", weights_only=False))

    before = trained(2, "saved")
    ftrun("export", "saved", "atoms", "--format", "atoms")
    (words,) = safetensors.torch.load_file("atoms/model.words.weight/fp32.safetensors").values()
    assert torch.equal(words, before["model"]["words.weight"])
    ftrun("load", "atoms", "new")
    after = trained(3, "new")  # has no step to train
    check_same(after, before)
