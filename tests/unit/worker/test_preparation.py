"""What is prepared before a restart: results of functions, in the process that calls them."""

import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import ftrun
from ftrun import linux
from ftrun.wire.messages.agent_start import ZygoteSettings
from ftrun.worker.process import preparation

MODULE = """
import random, sys, torch
CALLS = []
def load():
    random.random(), torch.rand(1)
    CALLS.append(list(sys.argv))
    return CALLS
class Index:
    @staticmethod
    def build():
        return "built"
def fails():
    raise SystemExit("no licence")
def opens():
    return open(__file__)
"""

Prepare = Callable[..., str]


@pytest.fixture
def prepare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Prepare:
    """Call functions of a module in the script's folder, with `train.py --data x` as arguments."""
    (tmp_path / "preparable.py").write_text(MODULE)
    monkeypatch.setattr(preparation, "_results", {})
    # Other tests may have started threads in this process.
    monkeypatch.setattr(linux, "unfit_to_fork", lambda: "")
    monkeypatch.delitem(sys.modules, "preparable", raising=False)

    def prepare(*names: str) -> str:
        folder, argv = str(tmp_path), ["train.py", "--data", "x"]
        return preparation.prepare_all(ZygoteSettings(folder, [], list(names), argv))

    return prepare


def test_a_result_is_made_once_and_draws_no_number_of_the_script(prepare: Prepare) -> None:
    before = random.getstate(), torch.get_rng_state()
    argv, path = list(sys.argv), list(sys.path)
    assert prepare("preparable:load", "preparable:Index.build") == ""
    module = sys.modules["preparable"]
    assert ftrun.prepared(module.load) == [["train.py", "--data", "x"]]
    assert ftrun.prepared(module.load) is ftrun.prepared(module.load)
    assert ftrun.prepared(module.Index.build) == "built"
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert (sys.argv, sys.path) == (argv, path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("preparable:fails", "SystemExit: no licence"),
        ("preparable:missing", "AttributeError: module 'preparable' has no attribute 'missing'"),
        ("missing_module:load", "ModuleNotFoundError: No module named 'missing_module'"),
    ],
)
def test_a_function_that_fails_is_named(prepare: Prepare, name: str, text: str) -> None:
    with pytest.raises(preparation.PreparationFailed, match=f"--prepare {name} failed: {text}"):
        prepare("preparable:load", name)


def test_a_file_that_stays_open_must_not_be_shared(prepare: Prepare) -> None:
    reason = prepare("preparable:opens")
    assert reason.startswith("preparable:opens: it leaves /")
    assert "preparable.py open" in reason
    ftrun.prepared(sys.modules["preparable"].opens).close()


def test_outside_of_ftrun_it_is_a_call_that_needs_no_torch() -> None:
    code = (
        "import sys, random, ftrun\n"
        "random.seed(1); first = random.random(); random.seed(1)\n"
        "assert ftrun.prepared(random.random) == first\n"
        "assert random.random() == first\n"
        "assert not {'torch', 'ftrun.linux'} & sys.modules.keys()\n"
        "def load(): return 3\n"
        "assert ftrun.prepared(load) == 3\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)


def test_the_settings_of_a_zygote_come_back_from_their_text() -> None:
    start = {"preload": ["a"], "prepare": ["b:c"]}
    made = ZygoteSettings.of("/here", start, ["--nproc-per-node=2", "--", "train.py", "-x"])
    assert made == ZygoteSettings("/here", ["a"], ["b:c"], ["train.py", "-x"])
    assert ZygoteSettings.decode(made.encode()) == made


@pytest.mark.full
def test_the_compiler_can_be_imported_in_a_process_that_is_forked(tmp_path: Path) -> None:
    """In a process with the modules of a zygote; each name is one of torch, but the last one."""
    (tmp_path / "its_priority.py").write_text(
        "import os, threading\nFOUND = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())\n"
    )
    code = (
        "import os, sys\n"
        "from ftrun.worker.process import preparation\n"
        "from ftrun.worker.process.zygote import PRELOAD, preload\n"
        f"sys.path.append({str(tmp_path)!r})\n"
        "preparation.COMPILER += ('its_priority',)\n"
        "assert preload(PRELOAD) == {}\n"
        "before = os.getpriority(os.PRIO_PROCESS, 0)\n"
        "assert preparation.import_compiler() == ''\n"
        "import its_priority\n"
        "assert before == os.getpriority(os.PRIO_PROCESS, 0) < its_priority.FOUND\n"
        "from torch._inductor.cpu_vec_isa import valid_vec_isa_list\n"
        "assert valid_vec_isa_list.cache_info().currsize == 1\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)
