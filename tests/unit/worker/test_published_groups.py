"""The page shows ranks and backends of a rank's process groups."""

import subprocess
import sys

CODE = """
import os, sys, tempfile
import torch.distributed as dist
from ftrun.monitor.page_values import Backends, decode_backends
from ftrun.wire.shared_memory.pages import SharedPage, create_page
from ftrun.worker.process.introspection import publish_groups

page = SharedPage(create_page("test"))
publish_groups(page)
assert (page.groups, page.backends) == ("", "")
store = "file://" + tempfile.mktemp()
dist.init_process_group("cpu:gloo", init_method=store, rank=0, world_size=1)
publish_groups(page)
assert page.groups == "0=0", page.groups
second = dist.new_group([0])
publish_groups(page)
assert page.groups == "0=0 1=0", page.groups
dist.destroy_process_group(second)
dist.new_group([0])
publish_groups(page)
assert page.groups == "0=0 2=0", page.groups
assert decode_backends(page.backends) == Backends({"cpu": "gloo"}), page.backends
os._exit(0)
"""


def test_groups_are_published_with_their_backends() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
