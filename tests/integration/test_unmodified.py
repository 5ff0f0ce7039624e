"""An unmodified script finds under ftrun what it finds under python or torchrun."""

import os
import py_compile
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.conftest import Start, is_gone

pytestmark = [pytest.mark.launch, pytest.mark.timeout(600)]

Script = Callable[..., str]

SHOW = """
import sys
import helper
main = sys.modules["__main__"]
print(__name__, sys.argv, sys.path[0], helper.NAME, getattr(main, "__file__", None))
"""
AS_A_RANK = """
import sys
sys.path.insert(0, sys.argv.pop(1))
from ftrun.worker.process.startup import run_script
del sys.path[0]
run_script(sys.argv[1:], is_module=False)
"""
ROOT = Path(__file__).parents[2]


def symlink(project: Path, folder: Path) -> str:
    (folder / "link.py").symlink_to(project / "train.py")
    return "link.py"


def in_folder(project: Path, folder: Path) -> str:
    (project / "train.py").rename(project / "__main__.py")
    return str(project)


def zipped(project: Path, folder: Path) -> str:
    with zipfile.ZipFile(folder / "app.pyz", "w") as file:
        file.write(project / "train.py", "__main__.py")
        file.write(project / "helper.py", "helper.py")
    return "app.pyz"


def compiled(project: Path, folder: Path) -> str:
    py_compile.compile(str(project / "train.py"), cfile=str(project / "train.pyc"))
    return str(project / "train.pyc")


@pytest.mark.parametrize("form", [symlink, in_folder, zipped, compiled])
def test_a_script_of_each_form_runs_as_under_python(
    tmp_path: Path, form: Callable[[Path, Path], str]
) -> None:
    project, folder = tmp_path / "project", tmp_path / "work"
    project.mkdir()
    folder.mkdir()
    (project / "train.py").write_text(SHOW)
    (project / "helper.py").write_text("NAME = 'helper'\n")
    name = form(project, folder)
    outputs = [
        subprocess.run(
            [sys.executable, *words, name, "an argument"],
            cwd=folder, capture_output=True, text=True, check=False,
        )
        for words in ([], ["-c", AS_A_RANK, str(ROOT)])
    ]  # fmt: skip
    assert outputs[1].stdout == outputs[0].stdout, outputs[1].stderr
    assert "helper" in outputs[0].stdout


@pytest.mark.full
def test_more_arguments_than_a_message_holds_reach_a_warm_rank(
    start: Start, script: Script
) -> None:
    name = script("import sys\nprint('characters', sum(map(len, sys.argv[1:])))\n")
    run = start(name, *["x" * 1000] * 400, env={"LARGE": "y" * 100_000})
    assert run.wait() == 0, run.text
    assert "characters 400000" in run.text
    assert not run.journal("fresh_start_used")


@pytest.mark.full
def test_bytes_that_are_not_utf_8_reach_the_rank(start: Start, script: Script) -> None:
    name = script("import os\nprint(os.environb[b'FOREIGN'], os.environ['FOREIGN'])\n")
    foreign = os.fsdecode(b"Andr\xe9")
    run = start(name, env={"FOREIGN": foreign, "PYTHONIOENCODING": "utf-8:surrogateescape"})
    assert run.wait() == 0, run.text
    assert r"b'Andr\xe9'" in run.text


@pytest.mark.full
def test_streams_have_the_error_handler_of_the_environment(start: Start, script: Script) -> None:
    name = script("import sys\nprint('handlers', sys.stdin.errors, sys.stdout.errors)\n")
    run = start(name, env={"PYTHONIOENCODING": "utf-8:surrogateescape"})
    assert run.wait() == 0, run.text
    assert "handlers surrogateescape surrogateescape" in run.text
    assert not run.journal("fresh_start_used")


@pytest.mark.full
def test_a_terminal_of_another_size_ends_no_rank(start: Start, script: Script) -> None:
    name = script("import pathlib, time\nwhile not pathlib.Path('go').exists(): time.sleep(0.02)\n")
    run = start(name)
    run.wait_until("started", lambda: run.journal("generation_started"))
    for pid in (run.process.pid, run.pid_of("agent")):
        os.kill(pid, signal.SIGWINCH)
    (run.folder / "go").touch()
    assert run.wait() == 0, run.text
    assert len(run.journal("generation_started")) == 1, run.text
    assert "bug" not in run.text


@pytest.mark.full
def test_a_command_ignores_no_signal(start: Start) -> None:
    """A shell cannot reset signals that were ignored when it began: `yes | head` would not end."""
    run = start("--no-python", "grep", "SigIgn", "/proc/self/status")
    assert run.wait() == 0, run.text
    (ignored,) = (line.split()[1] for line in run.text.splitlines() if line.startswith("SigIgn"))
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        assert not int(ignored, 16) >> (number - 1) & 1


@pytest.mark.full
def test_without_a_gpu_ranks_are_not_bound_to_its_cores(start: Start, script: Script) -> None:
    run = start("--numa-binding", "node", script("print('ran')\n"))
    assert run.wait() == 2, run.text
    assert "--numa-binding cannot bind local rank 0" in run.text


def test_a_forwarded_signal_does_not_end_the_run_when_the_agent_is_killed(
    start: Start, script: Script
) -> None:
    name = script(
        "import pathlib, signal, time\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "pathlib.Path('up').touch()\n"
        "while not pathlib.Path('go').exists(): time.sleep(0.02)\n"
    )
    run = start("--no-snapshots", "--forward-signals", "HUP", name)
    run.wait_until("up", (run.folder / "up").exists)
    run.process.send_signal(signal.SIGHUP)
    run.wait_until("forwarded", lambda: run.journal("signal_forwarded"))
    os.kill(run.pid_of("agent"), signal.SIGKILL)
    run.wait_until("restarted", lambda: len(run.journal("generation_started")) == 2)
    (run.folder / "go").touch()
    assert run.wait() == 0, run.text


FILLS_THE_DISK = """
import os, signal
generation = os.environ["TORCHELASTIC_RESTART_COUNT"]
print("generation", generation, flush=True)
if generation == "0":
    try:
        for number in range(1000):
            open(f"ftrun-logs/{number}", "w").close()
    except OSError:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_full_disk_for_logs_does_not_end_the_run(tmp_path: Path) -> None:
    """No folder can be made for the log files of the second generation."""
    (tmp_path / "train.py").write_text(FILLS_THE_DISK)
    (tmp_path / "ftrun-logs").mkdir()
    mount = 'mount -t tmpfs -o nr_inodes=60 none ftrun-logs && exec "$@"'
    words = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, "sh"]
    if subprocess.run([*words, "true"], cwd=tmp_path, check=False).returncode:
        pytest.skip("needs namespaces")
    done = subprocess.run(
        [*words, sys.executable, "-m", "ftrun", "--redirects", "3", "train.py"],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no log files from generation 1 on" in done.stderr + done.stdout
    assert "bug" not in done.stderr


def test_orphans_of_ranks_leave_no_zombies(start: Start, script: Script) -> None:
    name = script(
        "import os, pathlib, time\nfor _ in range(20): os.system('true &')\n"
        "pathlib.Path('up').touch()\n"
        "while not pathlib.Path('go').exists(): time.sleep(0.02)\n"
    )
    run = start("--start", "fresh", name)
    run.wait_until("up", (run.folder / "up").exists)
    agent = run.pid_of("agent")
    children = Path(f"/proc/{agent}/task/{agent}/children")
    run.wait_until("reaped", lambda: not any(map(is_gone, map(int, children.read_text().split()))))
    (run.folder / "go").touch()
    assert run.wait() == 0, run.text


@pytest.mark.full
def test_orphans_are_reaped_after_a_standby_has_died(start: Start, script: Script) -> None:
    name = script(
        "import os, pathlib, time\npathlib.Path('up').touch()\n"
        "while not pathlib.Path('now').exists(): time.sleep(0.02)\n"
        "for _ in range(5): os.system('true &')\npathlib.Path('made').touch()\n"
        "while not pathlib.Path('go').exists(): time.sleep(0.02)\n"
    )
    run = start(name)
    run.wait_until("up", (run.folder / "up").exists)
    agent = run.pid_of("agent")
    children = Path(f"/proc/{agent}/task/{agent}/children")

    def standbys() -> list[int]:
        pids = map(int, children.read_text().split())
        return [one for one in pids if Path(f"/proc/{one}/comm").read_text() == "ftrun-standby\n"]

    run.wait_until("a standby", standbys)
    for pid in standbys():
        os.kill(pid, signal.SIGKILL)
    (run.folder / "now").touch()
    run.wait_until("made", (run.folder / "made").exists)
    run.wait_until("reaped", lambda: not any(map(is_gone, map(int, children.read_text().split()))))
    (run.folder / "go").touch()
    assert run.wait() == 0, run.text


def test_variables_without_effect_are_named_if_the_script_fails_by_them(
    start: Start, script: Script
) -> None:
    name = script(
        "import os\nos.environ['PYTORCH_CUDA_ALLOC_CONF'] = 'backend:cudaMallocAsync'\n"
        "os.environ['PYTORCH_ALLOC_CONF'] = 'expandable_segments:True'\n"
        "import torch\nraise RuntimeError('the allocator is another one')\n"
    )
    run = start(name)
    assert run.wait() == 1, run.text
    assert "ftrun: PYTORCH_CUDA_ALLOC_CONF set by the script has no effect" in run.text


def test_a_device_mesh_that_makes_the_process_group_is_observed(
    start: Start, script: Script
) -> None:
    name = script(
        "import pathlib, time\nfrom torch.distributed.device_mesh import init_device_mesh\n"
        "mesh = init_device_mesh('cpu', (1,))\nfrom ftrun.worker.context import worker_context\n"
        "from ftrun.wire.shared_memory.pages import HeartbeatField\n"
        "print('server', worker_context().page.get(HeartbeatField.HAS_SERVER))\n"
    )
    run = start(name)
    assert run.wait() == 0, run.text
    assert "server 1" in run.text


TWO_SESSIONS = """
import os, pathlib, signal, sys
import torch, ftrun

def train(model, steps):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    session = ftrun.attach(model=model, optimizer=optimizer)
    for step in session.steps(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 4)).square().sum().backward()
        optimizer.step()
        dies = len(sys.argv) > 1 and session.id == sys.argv[1] and session.generation == 0
        yield step, dies
    session.close()

torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
for _ in train(model, 20):
    pass
print("first", torch.stack([p.detach().sum() for p in model.parameters()]).tolist())
for step, dies in train(model, 10):
    if dies and step == 7:
        pathlib.Path("dies").touch()
        os.kill(os.getpid(), signal.SIGKILL)
print("second", torch.stack([p.detach().sum() for p in model.parameters()]).tolist())
"""


@pytest.mark.full
def test_a_second_session_is_repeated_from_its_start(start: Start, script: Script) -> None:
    name = script(TWO_SESSIONS)
    undisturbed = start("--snapshot-every", "1", name)
    assert undisturbed.wait() == 0, undisturbed.text
    run = start("--snapshot-every", "1", "--run-id", "two-sessions", name, "two-sessions")
    assert run.wait() == 0, run.text
    assert (run.folder / "dies").exists(), run.text
    assert "a second session is in no snapshot" in run.text

    def results(text: str) -> list[str]:
        return [line for line in text.splitlines() if line.startswith(("first", "second"))]

    first, second = results(undisturbed.text)
    assert results(run.text) == [first, first, second]
