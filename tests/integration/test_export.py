"""An export is, bit for bit, the state that the script itself saved with torch's own functions.

Real trainings, DDP and FSDP2, two ranks each, shared by all tests. The one with DDP, and repeated
checks of another format, run only with --full.
"""

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from tests.integration.conftest import Run, in_full
from tests.integration.scripts.exported_training import STEPS, Model

SCRIPT = Path(__file__).parent / "scripts" / "exported_training.py"
TIED = {"head.weight": "words.weight"}
SAMPLE = "layers.0.weight"
FILE_SIZE_LIMIT = 100_000

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
]


each_kind = pytest.mark.parametrize("kind", [*in_full("ddp"), "fsdp"])
each_format = pytest.mark.parametrize("form", ["safetensors", *in_full("dcp", "state_dict")])


def export(*words: object, code: int = 0, **how: Any) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "ftrun", "checkpoints", "export", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
        **how,
    )
    assert done.returncode == code, (done.stdout, done.stderr)
    return done.stdout + done.stderr


class Trainings:
    """Checkpoints of both trainings, and the files they saved by themselves; made on request."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def saved(self, kind: str) -> Path:
        found = self._folder / f"saved-{kind}"
        if not found.exists():
            words = ("--nproc-per-node", "2", "--checkpoint-dir", found.name, str(SCRIPT), kind)
            run = Run(self._folder, *words, str(self._folder), env={"OMP_NUM_THREADS": "1"})
            try:
                assert run.wait() == 0, run.text
            finally:
                run.end()
        return found

    def whole(self, kind: str) -> dict[str, Any]:
        self.saved(kind)
        return dict(torch.load(self._folder / f"whole-{kind}.pt", weights_only=True))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trainings:
    return Trainings(tmp_path_factory.mktemp("trained"))


@pytest.fixture
def copied(trained: Trainings, tmp_path: Path) -> Callable[[str], Path]:
    """A copy of the checkpoint, to damage."""

    def copy(kind: str) -> Path:
        latest = (trained.saved(kind) / "latest").resolve()
        return Path(shutil.copytree(latest, tmp_path / "copied" / latest.name))

    return copy


def tensors_of(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def check_same(found: Any, wanted: Any, path: str = "") -> None:
    """Equal in every bit, with the same dtypes, shapes and keys."""
    if isinstance(wanted, torch.Tensor):
        assert isinstance(found, torch.Tensor), path
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape), path
        raw = [one.contiguous().view(-1).view(torch.uint8) for one in (found, wanted)]
        assert torch.equal(*raw), path
    elif isinstance(wanted, dict):
        assert sorted(found, key=str) == sorted(wanted, key=str), path
        for key, value in wanted.items():
            check_same(found[key], value, f"{path}.{key}")
    elif isinstance(wanted, list | tuple):
        assert len(found) == len(wanted), path
        for at, value in enumerate(wanted):
            check_same(found[at], value, f"{path}[{at}]")
    else:
        assert found == wanted, path


def read_safetensors(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= safetensors.torch.load_file(path)
    return found


def fresh() -> tuple[Model, torch.optim.Optimizer]:
    model = Model()
    return model, torch.optim.AdamW(model.parameters())


@each_kind
def test_safetensors_hold_the_model_as_it_was(
    trained: Trainings, tmp_path: Path, kind: str
) -> None:
    reported = export(trained.saved(kind), tmp_path / "out", "--format", "safetensors")
    wanted = tensors_of(trained.whole(kind)["model"])
    folder = tmp_path / "out"
    check_same(read_safetensors(folder), {n: t for n, t in wanted.items() if n not in TIED})
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(wanted) - set(TIED)
    with safe_open(folder / "model-00001-of-00001.safetensors", "pt") as opened:
        assert opened.metadata() == {"format": "pt", **TIED}
    model, _ = fresh()
    model.counted = torch.nn.Identity()  # the library's own loader knows no extra state
    safetensors.torch.load_model(model, folder / "model-00001-of-00001.safetensors")
    check_same(tensors_of(model.state_dict()), wanted)
    for name in ("optimizer", "scheduler", "table", "progress", "model.counted._extra_state"):
        assert f"left out  {name}: " in reported
    assert "left out  random states of 2 ranks, dice" in reported
    assert "head.weight is tied to words.weight" in reported
    assert "model.norm.running_mean differs between ranks" in reported


def test_torch_reads_the_safetensors_in_any_other_layout(
    trained: Trainings, tmp_path: Path
) -> None:
    export(trained.saved("fsdp"), tmp_path / "out", "--format", "safetensors")
    state = {n: t for n, t in tensors_of(Model().state_dict()).items() if n not in TIED}
    dcp.load(state, storage_reader=HuggingFaceStorageReader(str(tmp_path / "out")), no_dist=True)
    wanted = tensors_of(trained.whole("fsdp")["model"])
    check_same(state, {name: wanted[name] for name in state})


def test_files_are_cut_at_a_size_and_are_the_same_for_any_number_of_writers(
    trained: Trainings, tmp_path: Path
) -> None:
    for writers in (1, 3):
        words = ("--format", "safetensors", "--file-size", "400KB", "--workers", writers)
        export(trained.saved("fsdp"), tmp_path / str(writers), *words)
    one, three = ({p.name: p.read_bytes() for p in (tmp_path / n).iterdir()} for n in ("1", "3"))
    assert one == three
    names = sorted(name for name in one if name.startswith("model-"))
    assert len(names) > 2
    assert names[-1] == f"model-{len(names):05d}-of-{len(names):05d}.safetensors"
    wanted = tensors_of(trained.whole("fsdp")["model"])
    check_same(read_safetensors(tmp_path / "3"), {n: wanted[n] for n in wanted if n not in TIED})


@each_kind
def test_dcp_is_loaded_by_torch_with_the_optimizer(
    trained: Trainings, tmp_path: Path, kind: str
) -> None:
    reported = export(trained.saved(kind), tmp_path / "out", "--format", "dcp")
    wanted = trained.whole(kind)
    model, optimizer = fresh()
    torch.optim.lr_scheduler.StepLR(optimizer, 2)  # adds something to the groups
    names = ("model", "optimizer")
    state: dict[str, Any] = dict(zip(names, get_state_dict(model, optimizer), strict=True))
    dcp.load(state, checkpoint_id=tmp_path / "out", no_dist=True)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    got = dict(zip(names, get_state_dict(model, optimizer), strict=True))
    check_same(got, {name: wanted[name] for name in names})
    assert "left out  random states of 2 ranks, dice" in reported
    dcp_to_torch_save(tmp_path / "out", tmp_path / "out.pt")
    saved = torch.load(tmp_path / "out.pt", weights_only=True)
    check_same(saved["model"], wanted["model"])
    check_same(saved["table"], wanted["table"])
    assert saved["ftrun"] == {"step": STEPS, "epoch": 0}


@each_kind
def test_a_state_dict_goes_into_a_model_and_an_optimizer_of_one_process(
    trained: Trainings, tmp_path: Path, kind: str
) -> None:
    reported = export(trained.saved(kind), tmp_path / "out.pt", "--format", "state_dict")
    assert "weights_only" not in reported
    saved = torch.load(tmp_path / "out.pt", weights_only=True)
    wanted = trained.whole(kind)
    check_same(saved["model"], wanted["model"])
    check_same(saved["scheduler"], wanted["scheduler"])
    check_same(saved["table"], wanted["table"])
    assert saved["model"]["head.weight"].data_ptr() == saved["model"]["words.weight"].data_ptr()
    model, optimizer = fresh()
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    _, got = get_state_dict(model, optimizer)
    check_same(got, wanted["optimizer"])
    array = saved["progress"].pop("array")
    assert array.tolist() == [0, 1, 2]
    assert saved["progress"] == {"best": (STEPS - 1) / 8, "seen": (1, 2), 7: None}
    assert "progress.array is a numpy array; it is written as a tensor" in reported
    # torch saves a zip archive whose checksums are right; so is this file.
    subprocess.run([sys.executable, "-m", "zipfile", "-t", tmp_path / "out.pt"], check=True)


@each_format
def test_another_dtype_is_that_of_the_model_only(
    trained: Trainings, tmp_path: Path, form: str
) -> None:
    out = tmp_path / "out"
    export(trained.saved("fsdp"), out, "--format", form, "--dtype", "bf16")
    before = trained.whole("fsdp")
    wanted = {
        name: one.bfloat16() if one.is_floating_point() else one
        for name, one in tensors_of(before["model"]).items()
    }
    if form == "safetensors":
        check_same(read_safetensors(out), {n: wanted[n] for n in wanted if n not in TIED})
        return
    if form == "dcp":
        dcp_to_torch_save(out, tmp_path / "out.pt")
    saved = torch.load(tmp_path / "out.pt" if form == "dcp" else out, weights_only=True)
    check_same(tensors_of(saved["model"]), wanted)
    (exp_avg,) = {s["exp_avg"].dtype for s in saved["optimizer"]["state"].values()} - {
        torch.bfloat16
    }
    assert exp_avg == torch.float32
    check_same(saved["table"], before["table"])


def test_only_what_is_wanted(trained: Trainings, tmp_path: Path) -> None:
    source = trained.saved("fsdp")
    wanted = trained.whole("fsdp")
    export(source, tmp_path / "a", "--format", "safetensors", "--only", "model.layers.*.bias")
    biases = {n: t for n, t in wanted["model"].items() if re.fullmatch(r"layers\.\d\.bias", n)}
    assert len(biases) == 3
    check_same(read_safetensors(tmp_path / "a"), biases)
    words = ("--format", "state_dict", "--only", "optimizer", "--only", "model.head.weight")
    export(source, tmp_path / "b", *words)
    saved = torch.load(tmp_path / "b", weights_only=True)
    assert set(saved) == {"model", "optimizer"}
    check_same(saved["model"], {"head.weight": wanted["model"]["head.weight"]})
    reported = export(source, tmp_path / "c", "--format", "dcp", "--only", "modle.*", code=1)
    assert "--only 'modle.*' matches nothing; existing names: model.head.weight, " in reported
    reported = export(source, tmp_path / "c", "--format", "safetensors", "--only", "table", code=1)
    assert "no tensor of a module" in reported
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def place_of(folder: Path, rank: int, name: str) -> tuple[Path, int]:
    """The file of a rank, and the offset in it of a tensor of the model."""
    path = folder / f"rank-{rank:05d}.safetensors"
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        found = json.loads(file.read(length))[f"model.{name}"]
    return path, 8 + length + int(found["data_offsets"][0])


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


@each_format
def test_damage_is_reported_with_file_and_tensor_and_leaves_nothing(
    copied: Callable[[str], Path], tmp_path: Path, form: str
) -> None:
    folder = copied("fsdp")
    path, at = place_of(folder, 1, SAMPLE)
    flip(path, at + 100)
    reported = export(folder, tmp_path / "out", "--format", form, code=1)
    assert f"{path} is damaged: piece " in reported
    assert f"which has model.{SAMPLE}, differs" in reported
    assert "Traceback" not in reported
    assert [one.name for one in tmp_path.iterdir()] == ["copied"]


@pytest.mark.full
def test_another_ranks_copy_replaces_a_damaged_one(
    copied: Callable[[str], Path], trained: Trainings, tmp_path: Path
) -> None:
    folder = copied("ddp")
    path, at = place_of(folder, 0, SAMPLE)
    flip(path, at)
    reported = export(folder, tmp_path / "out", "--format", "safetensors")
    assert f"{path} is damaged" in reported
    assert "rank-00001.safetensors has a whole copy" in reported
    found = read_safetensors(tmp_path / "out")[SAMPLE]
    check_same(found, trained.whole("ddp")["model"][SAMPLE])
    other, at = place_of(folder, 1, SAMPLE)
    flip(other, at)
    reported = export(folder, tmp_path / "again", "--format", "safetensors", code=1)
    assert f"{path} is damaged" in reported


@pytest.mark.parametrize("damaged", ["rank-00000.digests", "rank-00001.safetensors", "index.json"])
def test_damage_of_what_describes_a_shard_is_reported(
    copied: Callable[[str], Path], tmp_path: Path, damaged: str
) -> None:
    folder = copied("fsdp")
    flip(folder / damaged, 40)
    reported = export(folder, tmp_path / "out", "--format", "safetensors", code=1)
    assert (damaged if damaged != "index.json" else f"{folder}: its index") in reported
    assert "Traceback" not in reported
    (folder / damaged).unlink()
    reported = export(folder, tmp_path / "out", "--format", "safetensors", code=1)
    assert "Traceback" not in reported


@each_format
def test_a_full_disk_leaves_nothing_half_written(
    trained: Trainings, tmp_path: Path, form: str
) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_SIZE_LIMIT, FILE_SIZE_LIMIT))

    out = tmp_path / "out"
    source = trained.saved("fsdp")
    reported = export(source, out, "--format", form, code=1, preexec_fn=limit)
    assert f"{out} is not written: " in reported
    assert "Traceback" not in reported
    assert list(tmp_path.iterdir()) == []


def test_safetensors_need_no_torch(trained: Trainings, tmp_path: Path) -> None:
    blocked = tmp_path / "blocked"
    blocked.mkdir()
    (blocked / "torch.py").write_text("raise ImportError('torch must not be loaded here')\n")
    path = f"{blocked}:{os.environ.get('PYTHONPATH', '')}"
    words = (trained.saved("fsdp"), tmp_path / "out")
    export(*words, "--format", "safetensors", env={**os.environ, "PYTHONPATH": path})
    reported = export(
        *words, "--format", "dcp", "--force", code=1, env={**os.environ, "PYTHONPATH": path}
    )
    assert "torch must not be loaded here" in reported
    assert read_safetensors(tmp_path / "out")


@pytest.mark.full
def test_what_is_there_is_replaced_only_when_it_is_asked_for(
    trained: Trainings, tmp_path: Path
) -> None:
    words = (trained.saved("fsdp"), tmp_path / "out", "--format", "safetensors")
    export(*words)
    assert "exists already" in export(*words, code=2)
    before = (tmp_path / "out").stat().st_ino
    export(*words, "--force")
    assert (tmp_path / "out").stat().st_ino != before
    (tmp_path / "out" / "mine.txt").touch()
    reported = export(*words, "--force", code=1)
    assert "files that no export wrote (mine.txt)" in reported
    assert (tmp_path / "out" / "mine.txt").exists()
    reported = export(words[0], tmp_path / "out", "--format", "state_dict", "--force", code=1)
    assert "is not a file" in reported
    assert [one.name for one in tmp_path.iterdir()] == ["out"]


@pytest.mark.full
def test_an_export_that_is_killed_is_swept_by_the_next(
    copied: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = copied("fsdp")
    # A pipe in place of a file blocks it at the place where it has begun to write.
    words = ("export", str(folder), str(tmp_path / "out"), "--format", "dcp")
    for number in (signal.SIGKILL, signal.SIGTERM):
        process = subprocess.Popen(
            [sys.executable, "-m", "ftrun", "checkpoints", *words],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        give_up_s = time.monotonic() + 60
        while not list(tmp_path.glob(".out.export-*/out")):
            assert time.monotonic() < give_up_s
            assert process.poll() is None
            time.sleep(0.001)
        os.killpg(process.pid, number)
        process.wait(30)
    export(*words[1:])
    assert sorted(one.name for one in tmp_path.iterdir()) == ["copied", "out"]


@pytest.mark.parametrize(
    ("words", "code", "reported"),
    [
        (["/nowhere", "OUT", "--format", "dcp"], 1, "/nowhere is not a directory"),
        (["HERE", "OUT", "--format", "dcp"], 1, "there is no whole checkpoint in"),
        (["HERE", "OUT", "--format", "zip"], 2, "safetensors, dcp, state_dict"),
        (["HERE", "OUT", "--format", "dcp", "--dtype", "int4"], 2, "bf16, fp16, fp32, fp64"),
        (["HERE", "OUT", "--format", "dcp", "--file-size", "big"], 2, "500MB or 5GB"),
        (["HERE", "OUT", "--format", "dcp", "--workers", "0"], 2, "at least 1"),
        (["HERE", "HERE", "--format", "dcp"], 2, "exists already"),
    ],
)
def test_a_mistake_is_reported(tmp_path: Path, words: list[str], code: int, reported: str) -> None:
    places = {"OUT": tmp_path / "out", "HERE": tmp_path}
    said = export(*(places.get(word, word) for word in words), code=code)
    assert reported in said
    assert "Traceback" not in said


@pytest.mark.full
def test_what_the_page_shows_works(trained: Trainings, tmp_path: Path) -> None:
    """The lines of docs/checkpoints.md, executed in place of its commands."""
    page = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text()
    commands = re.findall(r"^    (ftrun checkpoints export .*)$", page, re.MULTILINE)
    shown = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert (len(commands), len(shown)) == (3, 3)
    for command in commands:
        _, _, _, source, *words = command.partition("  #")[0].split()
        assert source == "/data/run1"
        export(trained.saved("fsdp"), *words, cwd=tmp_path)
    code = f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r})\n"
    code += "from exported_training import Model\n" + "".join(shown)
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=90)
