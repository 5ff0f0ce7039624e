"""An installed ftrun, outside any checkout: status, profiles, a killed rank.

Usage: python packaging_check.py   (with the python of the environment to check)

`scripts/test` runs it in an environment into which only the wheel was installed.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

SCRIPT = """
import os, signal, time
from pathlib import Path
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, generation = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
for step in range(5):
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)
    if rank == 1 and step == 3 and generation == 0:
        os.kill(os.getpid(), signal.SIGKILL)
Path(f"restarted-{rank}").touch()
give_up_s = time.monotonic() + 120
while not Path("seen").exists() and time.monotonic() < give_up_s:
    time.sleep(0.02)
print(f"rank {rank} generation {generation} total {total.item()}\\n", end="", flush=True)
dist.destroy_process_group()
"""
DEADLINE_S = 120.0


def main() -> None:
    import ftrun

    package = Path(ftrun.__file__).parent
    assert package.is_relative_to(sys.prefix), f"{package} is not in {sys.prefix}"
    for name in ("profiles/default.yaml", "profiles/drill.yaml", "scripts/train_gpt.py"):
        assert (package / "_data" / name).is_file(), f"{name} is not in the wheel"
    assert (package / "py.typed").is_file()
    with tempfile.TemporaryDirectory() as folder:
        use(Path(folder), Path(sys.executable).parent / "ftrun")
    print("an installed ftrun runs, is asked for its status, and survives a killed rank")


def use(folder: Path, ftrun: Path) -> None:
    (folder / "train.py").write_text(SCRIPT)
    runtime = folder / "runtime"
    runtime.mkdir()
    variables = {**os.environ, "XDG_RUNTIME_DIR": str(runtime)}
    words = [str(ftrun), "--run-id", "packaged", "--nproc-per-node", "2", "train.py"]
    run = subprocess.Popen(words, cwd=folder, env=variables, stdout=subprocess.PIPE, text=True)
    try:
        wait_for(lambda: all((folder / f"restarted-{rank}").exists() for rank in (0, 1)), run)
        asked = subprocess.run(
            [str(ftrun), "status", "--json"],
            cwd=folder,
            env=variables,
            capture_output=True,
            text=True,
            check=True,
            timeout=DEADLINE_S,
        )
        (folder / "seen").touch()
        output, _ = run.communicate(timeout=DEADLINE_S)
    finally:
        if run.poll() is None:  # its memory would survive it
            stop = [str(ftrun), "stop", "packaged"]
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run(stop, cwd=folder, env=variables, check=False, timeout=DEADLINE_S)
        run.kill()
        run.wait()
    document = json.loads(asked.stdout)
    assert document["run_id"] == "packaged", document
    assert document["generation"] == 1, document
    assert len(document["restarts"]) == 1, document
    assert run.returncode == 0, (run.returncode, output)
    reported = subprocess.run(
        [str(ftrun), "report", "1"],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        check=True,
        timeout=DEADLINE_S,
    )
    assert re.search(
        r"rank 1 on \S+ was killed by SIGKILL( \(not out of memory\))?; started again after",
        reported.stdout,
    ), reported.stdout
    page = folder / "ftrun-logs" / "packaged" / "incident-0001.html"
    assert page.read_text().startswith("<!doctype html>")
    assert sorted(output.splitlines()) == [
        "rank 0 generation 1 total 1.0",
        "rank 1 generation 1 total 1.0",
    ], output
    assert not (runtime / "ftrun" / "packaged").exists(), "the run folder is still there"


def wait_for(is_so: Callable[[], bool], run: subprocess.Popen[str]) -> None:
    give_up_s = time.monotonic() + DEADLINE_S
    while not is_so():
        assert run.poll() is None, f"the run ended with {run.returncode}"
        assert time.monotonic() < give_up_s, "the run does not get there"
        time.sleep(0.02)


if __name__ == "__main__":
    main()
