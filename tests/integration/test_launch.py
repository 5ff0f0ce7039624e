"""A script without ftrun runs as under torchrun, and survives a kill of a rank."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.conftest import Start, in_full, is_gone

TRAIN = """
import os, sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(16, 16))
optimizer = torch.optim.AdamW(model.parameters())
generation = os.environ["TORCHELASTIC_RESTART_COUNT"]
port = os.environ["MASTER_PORT"]
print(f"begin rank={rank} generation={generation} pid={os.getpid()} port={port}", flush=True)
for step in range(int(sys.argv[1])):
    optimizer.zero_grad()
    model(torch.randn(4, 16)).pow(2).mean().backward()
    optimizer.step()
    if os.path.exists(f"die-{rank}-{generation}-{step}"):
        os.kill(os.getpid(), 9)
print(f"end rank={rank} generation={generation}", flush=True)
dist.destroy_process_group()
"""

CONTRACT = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE",
    "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_USE_AGENT_STORE", "OMP_NUM_THREADS",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
)  # fmt: skip

Script = Callable[..., str]

pytestmark = [pytest.mark.launch, pytest.mark.slow, pytest.mark.timeout(900)]

# A test looks for one string of `print`: several are written separately, with their separators, and
# other ranks may write in between.


@pytest.mark.parametrize("has_port", [False, pytest.param(True, marks=pytest.mark.full)])
def test_killed_rank_of_an_unmodified_script_is_respawned(
    start: Start, script: Script, tmp_path: Path, has_port: bool
) -> None:
    """With a given port, each generation has its store at that port."""
    (tmp_path / "die-1-0-20").touch()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    flags = ["--master-port", str(port)] if has_port else []
    run = start("--nproc-per-node", "2", *flags, script(TRAIN), "200")
    assert run.wait() == 0, run.text
    assert "begin rank=1 generation=1" in run.text
    assert "end rank=0 generation=1" in run.text
    assert "end rank=1 generation=1" in run.text
    (recovered,) = run.journal("generation_started")[1:]
    assert "killed by SIGKILL" in str(recovered["reason"])
    assert "does not call ftrun.attach" in str(recovered["reason"])
    assert run.text.count("was killed by SIGKILL") == 1, "announced once"
    assert run.text.count(f"port={port}") == (4 if has_port else 0)


def test_environment_is_torchruns(start: Start, script: Script, tmp_path: Path) -> None:
    name = script(
        "import json, os, sys\n"
        "path = f\"{sys.argv[1]}-{os.environ['RANK']}.json\"\n"
        "json.dump([dict(os.environ), sys.argv, sys.path[0], __file__, __name__],"
        " open(path, 'w'))\n"
    )
    words = ["--nproc-per-node", "2", "--max-restarts", "3", name]
    run = start(*words, "ours", "--flag")
    assert run.wait() == 0, run.text
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words, "theirs", "--flag"],
        cwd=tmp_path,
        env=run.variables,
        check=True,
        timeout=120,
    )
    for rank in (0, 1):
        ours = json.loads((tmp_path / f"ours-{rank}.json").read_text())
        theirs = json.loads((tmp_path / f"theirs-{rank}.json").read_text())
        assert [ours[0].get(key) for key in CONTRACT] == [theirs[0].get(key) for key in CONTRACT]
        assert ours[1] == [name, "ours", "--flag"]
        assert ours[2:] == theirs[2:]
        extra = {key for key in set(ours[0]) - set(theirs[0]) if not key.startswith("FTRUN_")}
        assert extra <= {"PYTORCH_NVML_BASED_CUDA_CHECK", "TORCH_FR_BUFFER_SIZE"}
        assert set(theirs[0]) - set(ours[0]) <= {"LC_CTYPE"}


def test_exception_ends_with_its_code_and_the_users_line(start: Start, script: Script) -> None:
    name = script("import torch\nraise SystemExit(7)\n")
    run = start("--nproc-per-node", "2", name)
    assert run.wait() == 7
    assert "Not retried" in run.text


def test_a_rank_that_leaves_early_is_the_first_cause_and_nothing_is_retried(
    start: Start, script: Script
) -> None:
    name = script(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "dist.barrier()\n"
        "if dist.get_rank() == 1:\n"
        "    raise SystemExit(0)\n"
        "dist.all_reduce(torch.ones(4))\n"
    )
    run = start("--nproc-per-node", "2", name)
    assert run.wait() == 1
    block = run.text[run.text.index("ftrun: run") :]
    assert re.search(
        r"rank 1 on \S+ exited early \(code 0\) while rank 0 was still in a collective", block
    )
    assert block.index("rank 1 on") < block.index("rank 0 failed because of it")
    assert "after 0 restarts" in block
    assert "Not retried" in block


@pytest.mark.full
def test_final_block_shows_the_first_cause_in_under_25_lines(start: Start, script: Script) -> None:
    name = script(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "if dist.get_rank() == 1:\n"
        "    raise ValueError('the culprit')\n"
        "dist.barrier()\n"
    )
    run = start("--nproc-per-node", "2", name)
    assert run.wait() == 1
    block = run.text[run.text.index("ftrun: run") :]
    assert "raised ValueError: the culprit" in block
    assert "raise ValueError('the culprit')" in block
    assert len(block.splitlines()) < 25


def test_same_failure_again_and_again_ends_with_93(start: Start, script: Script) -> None:
    name = script(
        "import torch\n"
        "weight = torch.zeros(1, requires_grad=True)\n"
        "optimizer = torch.optim.SGD([weight])\n"
        "for step in range(3):\n"
        "    weight.sum().backward()\n"
        "    optimizer.step()\n"
        "raise RuntimeError('again')\n"
    )
    run = start(name)
    assert run.wait() == 93
    assert len(run.journal("generation_started")) == 3


@pytest.mark.full
def test_max_restarts_zero_restarts_nothing(start: Start, script: Script, tmp_path: Path) -> None:
    (tmp_path / "die-1-0-5").touch()
    run = start("--nproc-per-node", "2", "--max-restarts", "0", script(TRAIN), "100")
    assert run.wait() == 137
    assert len(run.journal("generation_started")) == 1


def test_fresh_start_is_the_same_run(start: Start, script: Script, tmp_path: Path) -> None:
    (tmp_path / "die-0-0-5").touch()
    run = start("--start", "fresh", "--nproc-per-node", "2", script(TRAIN), "100")
    assert run.wait() == 0, run.text
    assert run.journal("fresh_start_used")
    assert run.journal("recovered"), "each rank has reported a step"


@pytest.mark.full
def test_a_preloaded_module_that_uses_a_device_costs_the_warm_start_only(
    start: Start, script: Script
) -> None:
    script("print('harmless')\n", "harmless.py")
    script(
        "import types, torch\n"
        "module = types.SimpleNamespace(is_initialized=lambda: True)\n"
        "torch.utils.rename_privateuse1_backend('gadget')\n"
        "torch._register_device_module('gadget', module)\n",
        "greedy.py",
    )
    run = start("--preload", "harmless", "--preload", "greedy", script("print('trained')\n"))
    assert run.wait() == 0, run.text
    assert "trained" in run.text
    (fresh,) = run.journal("fresh_start_used")
    assert str(fresh["reason"]).startswith("--preload greedy: torch.gadget.is_initialized()")
    assert run.text.count("--preload greedy: torch.gadget.is_initialized() is true") == 1


@pytest.mark.full
def test_modules_next_to_the_script_are_preloaded_and_a_failing_one_is_named(
    start: Start, script: Script, tmp_path: Path
) -> None:
    script(
        "import os, sys\n"
        "IMPORTED_IN = os.getpid()\n"
        "sys.path.insert(0, os.path.join(os.path.dirname(__file__), 'more'))\n",
        "neighbor.py",
    )
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "distant.py").touch()
    script("raise ValueError('this model needs a licence')\n", "broken.py")
    name = script(
        "import os, sys, neighbor, distant\n"
        "print('preloaded' if neighbor.IMPORTED_IN != os.getpid() else 'imported here')\n"
        "print(f'first folder is that of the script: {os.path.dirname(__file__) == sys.path[0]}')\n"
        "print(f'once: {sys.path.count(sys.path[0]) == 1}')\n"
    )
    modules = ("--preload", "neighbor", "--preload", "broken", "--preload", "nowhere")
    run = start(*modules, name)
    assert run.wait() == 0, run.text
    assert "preloaded" in run.text
    assert "first folder is that of the script: True" in run.text
    assert "once: True" in run.text
    assert "--preload broken failed: ValueError: this model needs a licence" in run.text
    assert "--preload nowhere failed: ModuleNotFoundError: No module named 'nowhere'" in run.text
    assert not run.journal("fresh_start_used"), "the zygote still forks"


def test_module_and_command_start(start: Start, script: Script) -> None:
    script("import sys, os\nprint(f'module {sys.argv[1:]} {os.environ[\"RANK\"]}')\n", "mod.py")
    run = start("--nproc-per-node", "2", "-m", "mod", "a", "-b")
    assert run.wait() == 0, run.text
    assert "module ['a', '-b'] 1" in run.text
    other = start("--no-python", "sh", "-c", "echo rank $RANK of $WORLD_SIZE")
    assert other.wait() == 0, other.text
    assert "rank 0 of 1" in other.text


def test_redirects_and_tee_go_where_torchrun_puts_them(start: Start, script: Script) -> None:
    name = script(
        "import os, sys\n"
        "print(f'out {os.environ[\"RANK\"]}\\n', end='')\n"
        "print('err', file=sys.stderr)\n"
    )
    words = ("--nproc-per-node", "2", "--log-dir", "logs", "--redirects", "3", "--tee", "1")
    run = start(*words, name)
    assert run.wait() == 0, run.text
    (attempt,) = (run.folder / "logs").glob("*/attempt_0")
    assert (attempt / "0" / "stdout.log").read_text() == "out 0\n"
    assert (attempt / "1" / "stderr.log").read_text() == "err\n"
    assert "out 1" in run.text
    assert "err" not in run.text


@pytest.mark.full
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a small file system")
def test_a_full_disk_of_the_output_is_named(start: Start, script: Script, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", small], check=True)
    try:
        words = ("--nproc-per-node", "1", "--log-dir", str(small), "--redirects", "3")
        run = start(*words, script("print('x' * 1_000_000)\n"))
        assert run.wait() in (1, 120), run.text
        assert re.search(
            rf"exited with code \d+: the disk of {re.escape(str(small))}\S* is full", run.text
        )
    finally:
        subprocess.run(["umount", "--lazy", small], check=True)


@pytest.mark.full
def test_a_working_directory_that_cannot_be_written(tmp_path: Path, script: Script) -> None:
    """As torchrun: the script runs there; the logs are elsewhere."""
    name = script("import os\nprint('in', os.getcwd())\n")
    variables = {k: v for k, v in os.environ.items() if not k.startswith("FTRUN_")}
    done = subprocess.run(
        [sys.executable, "-m", "ftrun", "--run-id", "away", str(tmp_path / name)],
        cwd="/proc",
        env={**variables, "TMPDIR": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert (done.returncode, done.stdout) == (0, "in /proc\n"), done.stderr
    logs = tmp_path / f"ftrun-logs-{os.getuid()}" / "away"
    assert "the logs cannot be written to /proc/ftrun-logs/away" in done.stderr
    assert f"They are in {logs}" in done.stderr
    assert (logs / "journal.jsonl").exists()


def test_script_finds_a_whole_interpreter(start: Start, script: Script) -> None:
    name = script("""
import atexit, os, pickle, random, sys, threading
import numpy, torch
from torch.utils.data import DataLoader, Dataset


class Numbers(Dataset):
    def __len__(self): return 8
    def __getitem__(self, index): return index


class Thing:
    value = 5


if __name__ == "__main__":
    assert sys.modules["__main__"].Thing is Thing
    assert pickle.loads(pickle.dumps(Thing())).value == 5
    assert sorted(int(n) for n in DataLoader(Numbers(), num_workers=2)) == list(range(8))
    spawned = DataLoader(Numbers(), num_workers=1, multiprocessing_context="spawn")
    assert sorted(int(n) for n in spawned) == list(range(8))
    assert sys.stdin.read() == ""
    print(f"numpy {numpy.random.randint(1 << 30)} torch {torch.initial_seed()}\\n", end="")
    atexit.register(lambda: print(f"atexit {os.environ['RANK']}\\n", end="", flush=True))
    threading.Thread(target=lambda: print("thread done\\n", end="", flush=True)).start()
""")
    run = start("--nproc-per-node", "2", name)
    assert run.wait() == 0, run.text
    assert "atexit 0" in run.text
    assert "atexit 1" in run.text
    numbers = [line.split()[1] for line in run.text.splitlines() if line.startswith("numpy")]
    assert len(set(numbers)) == 2, "numpy repeats its numbers in every rank"


@pytest.mark.full
def test_no_object_is_frozen_at_the_end_if_triton_would_report_it(
    start: Start, script: Script
) -> None:
    name = script("""
import gc, os, sys, types

class Last:
    def __del__(self, count=gc.get_freeze_count, write=os.write):
        write(1, f"frozen at the end: {count()}\\n".encode())

last = Last()
assert gc.get_freeze_count() > 0
sys.modules["triton._C.libtriton"] = types.ModuleType("libtriton")
""")
    run = start("--nproc-per-node", "1", name)
    assert run.wait() == 0, run.text
    assert "frozen at the end: 0" in run.text


@pytest.mark.full
def test_variable_set_before_import_torch_is_reported(start: Start, script: Script) -> None:
    name = script(
        "import os\nos.environ['OMP_NUM_THREADS'] = '3'\nimport torch\n"
        "os.environ['TORCHINDUCTOR_MAX_AUTOTUNE'] = '1'\n"
        "os.environ['TORCHINDUCTOR_CACHE_DIR'] = '/nowhere'\n"
        "weight = torch.zeros(1, requires_grad=True)\n"
        "optimizer = torch.optim.SGD([weight])\nweight.sum().backward()\noptimizer.step()\n"
    )
    run = start(name)
    assert run.wait() == 0
    names = "OMP_NUM_THREADS, TORCHINDUCTOR_MAX_AUTOTUNE"  # the other one is read when it is used
    assert f"{names} set by the script has no effect" in run.text


@pytest.mark.full
def test_torch_compile_works_in_a_warm_worker(start: Start, script: Script, tmp_path: Path) -> None:
    name = script(
        "import torch\n"
        "f = torch.compile(lambda x: (x * 2).sin().sum())\n"
        "print('compiled', float(f(torch.ones(8))))\n"
    )
    run = start(name, env={"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")})
    assert run.wait() == 0, run.text
    assert "compiled" in run.text
    assert any((tmp_path / "cache").iterdir())


def test_sigterm_stops_cleanly(start: Start, script: Script) -> None:
    run = start("--nproc-per-node", "2", script(TRAIN), "1000000")
    run.wait_for_step(5)
    pids = run.pids()
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 143
    assert all(is_gone(pid) for pid in pids)
    assert "stopped by SIGTERM" in run.text


def test_interrupt_names_the_step_and_where_it_is_kept(start: Start, script: Script) -> None:
    name = script("""
import time, torch, ftrun
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = ftrun.attach(model=model, optimizer=optimizer)
for step in session.steps(1 << 30):
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.02)
""")
    run = start("--nproc-per-node", "2", "--checkpoint-dir", "kept", name)
    run.wait_for_step(3)
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130
    assert "Traceback" not in run.text
    assert run.text.count("stopped by SIGINT") == 1
    stopped = re.search(
        r"stopped at +step (\d+)\n +kept +step (\d+) in (\S+)\n +to resume", run.text
    )
    assert stopped is not None, run.text
    assert stopped[1] == stopped[2]
    assert any(stopped[1] in path.name for path in (run.folder / "kept").iterdir())


def test_stopped_rank_is_acted_on(start: Start, script: Script) -> None:
    run = start(
        "--nproc-per-node",
        "2",
        "--set",
        "monitor.frozen_kill_after_s=0.5",
        script(TRAIN),
        "1000000",
    )
    run.wait_for_step(5)
    os.kill(run.pids()[0], signal.SIGSTOP)
    run.wait_until("restarted", lambda: len(run.journal("generation_started")) == 2)
    assert "was stopped (SIGSTOP)" in str(run.journal("generation_started")[1]["reason"])


@pytest.mark.parametrize("has_own_session", [False, *in_full(True)])
def test_data_loader_workers_of_a_killed_rank_die_with_it(
    start: Start, script: Script, has_own_session: bool
) -> None:
    name = script(
        """
import os, time, torch
from torch.utils.data import DataLoader, Dataset
class Items(Dataset):
    def __len__(self): return 1000000
    def __getitem__(self, index):
        if index > 10 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            time.sleep(600)  # so that it does not notice that its rank has ended
        return index
if __name__ == "__main__":
    begin = (lambda _: os.setsid()) if OWN_SESSION else None
    loader = iter(DataLoader(Items(), num_workers=2, worker_init_fn=begin))
    weight = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight])
    for step in range(10):
        next(loader); weight.sum().backward(); optimizer.step()
    kids = open(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read()
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        open("kids", "w").write(kids)
        os.kill(os.getpid(), 9)
    else:
        left = [kid for kid in open("kids").read().split() if os.path.exists(f"/proc/{kid}")]
        assert not left, left
""".replace("OWN_SESSION", str(has_own_session))
    )
    run = start(name)
    assert run.wait() == 0, run.text
    kids = [int(pid) for pid in (run.folder / "kids").read_text().split()]
    assert len(kids) == 2
    assert all(is_gone(pid) for pid in kids)
