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


def test_path_that_is_too_long_for_a_socket(tmp_path: Path) -> None:
    folder = tmp_path / ("a folder with a blank, an é and a long name " * 4)
    folder.mkdir()
    path = folder / "rank-0.sock"
    assert len(os.fsencode(path)) > 108
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.stdout == "1 0\n", done.stderr
