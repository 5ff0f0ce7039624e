"""The agent reads a rank's flight recorder for run folders with a path of any length."""

import os
import subprocess
import sys
from pathlib import Path

CODE = """
import os, sys
from types import SimpleNamespace
import torch.distributed
from ftrun.agent.observe.recorder import read_trace
from ftrun.wire.shared_memory.pages import HeartbeatField, SharedPage, create_page
from ftrun.worker.process.introspection import start_server

page, path = SharedPage(create_page("rank-0")), sys.argv[1]
start_server(SimpleNamespace(page=page, launch=SimpleNamespace(rank_socket=path)))
print(page.get(HeartbeatField.HAS_SERVER), len(read_trace(path).entries), flush=True)
os._exit(0)
"""


def output_of(code: str, argument: object, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, str(argument)],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_path_that_is_too_long_for_a_socket(tmp_path: Path) -> None:
    folder = tmp_path / ("a folder with a blank, an é and a long name " * 4)
    folder.mkdir()
    path = folder / "rank-0.sock"
    assert len(os.fsencode(path)) > 108
    assert output_of(CODE, path) == "1 0\n"


OLD_TORCH = """
import os, sys, threading
from pathlib import Path
from types import SimpleNamespace
import torch
import torch.distributed as dist
from recorder_server import Rank
from ftrun.agent.observe.recorder import RecorderReader
from ftrun.wire.shared_memory.pages import (
    HeartbeatField, SharedPage, create_page, create_stack_file, leave_calls
)
from ftrun.worker.process.introspection import write_calls_on_request

folder, path = Path(sys.argv[1]), sys.argv[1] + "/rank.sock"
(folder / "mode").write_text("")
fd, stack = create_page("rank-0"), create_stack_file("rank-0")
page = SharedPage(fd)
page.set(HeartbeatField.HAS_SERVER, 1)
page.groups, page.backends = "0=0", "cpu:gloo"
about = {"socket": path, "page": fd, "torch": "2.9", "backend": "gloo", "trace": {}}
threading.Thread(target=Rank(folder, about).serve_forever, daemon=True).start()
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
for _ in range(3):
    dist.all_reduce(torch.ones(2))

reader = RecorderReader(path, stack_fd=stack)
found = reader.read(page, deadline_s=0.5)
assert (found.groups, found.is_complete) == ((), True)
assert found.notes[0].startswith("torch before 2.10 shows"), found.notes
leave_calls(stack, b"x" * (1 << 20))  # longer than the trace
write_calls_on_request(SimpleNamespace(page=page, launch=SimpleNamespace(
    descriptors={"stack": stack})))
found = reader.read(page, deadline_s=60.0)
assert [(one.entered, one.ranks) for one in found.groups] == [(3, (0,))], found
assert found.notes == ()
os._exit(0)
"""


def test_a_torch_whose_server_has_no_handler_writes_the_trace_of_gloo(tmp_path: Path) -> None:
    search = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    output_of(OLD_TORCH, tmp_path, PYTHONPATH=search, TORCH_FR_BUFFER_SIZE="128")
