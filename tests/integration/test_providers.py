"""A training that draws its data from a state provider resumes bit for bit after a kill."""

import os
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
import torch
from torch import nn

from ftrun.config.profile import SnapshotConfig
from ftrun.errors import SnapshotWaitTimeout
from ftrun.wire.shared_memory.pages import HeartbeatField
from tests.integration.conftest import Start, in_full, script, start
from tests.integration.in_process_worker import TIMEOUT_S, Run

__all__ = ["script", "start"]

pytestmark = [pytest.mark.launch, pytest.mark.slow, pytest.mark.timeout(900)]

TRAIN = """
import hashlib, os, signal, sys, threading, time
import torch
from torch import nn

import ftrun

item_bytes, die_at = int(sys.argv[1]), set(map(int, sys.argv[2:]))


class Replay:
    \"\"\"Items are appended and never changed, so a tuple of them is frozen.\"\"\"

    def __init__(self):
        self.items = []

    def describe(self):
        return len(self.items) * item_bytes, tuple(self.items)

    def capture(self, frozen, into):
        for at, item in enumerate(frozen):
            into[at * item_bytes : (at + 1) * item_bytes] = item

    def restore(self, data):
        cuts = range(0, len(data), item_bytes)
        self.items = [bytes(data[at : at + item_bytes]) for at in cuts]


class Counts:
    \"\"\"Wrong: `capture` writes what the counter holds then, so ftrun captures it at once.\"\"\"

    def __init__(self):
        self.value = 0

    def describe(self):
        return 8, None

    def capture(self, frozen, into):
        into[:] = self.value.to_bytes(8, "little")

    def restore(self, data):
        self.value = int.from_bytes(data, "little")


class Late:
    \"\"\"Wrong: what it freezes changes after a step of the optimizer. It captures slowly.\"\"\"

    def __init__(self):
        self.values = [0]

    def describe(self):
        return 8, self.values

    def capture(self, frozen, into):
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.05)
        into[:] = frozen[0].to_bytes(8, "little")

    def restore(self, data):
        self.values[0] = int.from_bytes(data, "little")


torch.manual_seed(0)
model = nn.Linear(64, 64)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
replay, counts, late = Replay(), Counts(), Late()
session = ftrun.attach(model, optimizer, replay=replay, counts=counts, late=late)
for step in session.steps(16):
    if step in die_at and session.generation == len([one for one in die_at if one < step]):
        session.wait("committed")
        os.kill(os.getpid(), signal.SIGKILL)
    replay.items.append(torch.randint(0, 256, (item_bytes,), dtype=torch.uint8).numpy().tobytes())
    counts.value += step
    item = replay.items[int(torch.randint(len(replay.items), ()))]
    x = torch.frombuffer(bytearray(item[:256]), dtype=torch.uint8).view(4, 64) / 256
    loss = (model(x).pow(2).mean() + counts.value / 1000)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    late.values[0] += step
digest = hashlib.sha256(b"".join(replay.items))
for value in (*model.state_dict().values(), loss.detach()):
    digest.update(value.numpy().tobytes())
print("digest", counts.value, late.values[0], len(replay.items), digest.hexdigest(), flush=True)
"""

MB = 1 << 20


@pytest.mark.parametrize(
    ("item_bytes", "die_at"), [(100_000, ["7"]), *in_full((64 * MB, ["7", "13"]))]
)
def test_a_killed_rank_gets_the_bytes_of_its_providers_back(
    start: Start, script: str, tmp_path: Path, item_bytes: int, die_at: list[str]
) -> None:
    """16 items; in full 1 GB."""
    name = script(TRAIN)
    variables = {key: value for key, value in os.environ.items() if not key.startswith("FTRUN_")}
    plain = subprocess.run(
        [sys.executable, name, str(item_bytes)],
        cwd=tmp_path,
        env=variables,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    words = ("--nproc-per-node", "1", "--snapshot-every", "1")
    run = start(*words, name, str(item_bytes), *die_at)
    assert run.wait() == 0, run.text
    assert run.journal("generation_started")[-1]["generation"] == len(die_at)
    assert [line for line in run.text.splitlines() if line.startswith("digest")] == [
        line for line in plain.stdout.splitlines() if line.startswith("digest")
    ]
    assert "counts changed between a step boundary and the optimizer step" in run.text
    assert "replay changed" not in run.text


BROKEN = """
import os, sys
import torch
import torch.distributed as dist
from torch import nn

import ftrun

dist.init_process_group("gloo")
rank = dist.get_rank()


class Log:
    def __init__(self, size):
        self.content = bytes([rank]) * size
        self.fails = False

    def describe(self):
        return len(self.content), self.content

    def capture(self, frozen, into):
        if self.fails:
            raise OSError("no content")
        into[:] = frozen

    def restore(self, data):
        self.content = bytes(data)


log = Log(1_000_000 * (1 + rank))
model = nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters())
session = ftrun.attach(model, optimizer, log=log)
print(f"rank {rank} has {len(log.content)} of {set(log.content)}\\n", end="", flush=True)
for step in session.steps(int(sys.argv[1])):
    log.fails = step in (3, 4) and rank == 1
    optimizer.zero_grad()
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    if step == 6:
        handle = session.snapshot()
    if step == 7:
        print(f"rank {rank}", handle.wait("committed"), flush=True)
dist.destroy_process_group()
"""


@pytest.mark.full
def test_an_error_of_a_provider_costs_its_snapshots_and_another_number_of_ranks_resumes(
    start: Start, script: str, tmp_path: Path
) -> None:
    """Each rank has other bytes, of another size; a rank of another world takes one of them."""
    name, directory = script(BROKEN), str(tmp_path / "saved")
    words = ("--snapshot-every", "1", "--checkpoint-dir", directory)
    run = start("--nproc-per-node", "2", *words, name, "9")
    assert run.wait() == 0, run.text
    assert "UNPROTECTED: no snapshots until this is over: the state provider log: " in run.text
    assert "capture(): OSError: no content" in run.text
    assert "rank 0 True" in run.text
    assert "rank 1 True" in run.text, "a later boundary tries again"
    smaller = start("--nproc-per-node", "1", *words, name, "10")
    assert smaller.wait() == 0, smaller.text
    assert "rank 0 has 1000000 of {0}" in smaller.text
    assert "Each rank takes the state providers of the old rank" in smaller.text
    larger = start("--nproc-per-node", "3", *words, name, "12")
    assert larger.wait() == 0, larger.text
    for rank in range(3):
        assert f"rank {rank} has 1000000 of {{0}}" in larger.text


class Blocked:
    """In the copy thread, `capture` waits for the test."""

    def __init__(self) -> None:
        self.go_on = threading.Event()

    def describe(self) -> tuple[int, bytes]:
        return 4, b"abcd"

    def capture(self, frozen: bytes, into: memoryview) -> None:
        if threading.current_thread() is not threading.main_thread():
            assert self.go_on.wait(TIMEOUT_S)
        into[:] = frozen

    def restore(self, data: memoryview) -> None:
        assert bytes(data) == b"abcd"


def test_neither_a_due_boundary_nor_a_wait_outlasts_a_provider_that_writes(tmp_path: Path) -> None:
    with closing(Run(tmp_path)) as run:
        run.settings = SnapshotConfig(every=1, commit_timeout_s=TIMEOUT_S, verify_first=0)
        model, blocked = nn.Linear(300, 300), Blocked()
        optimizer = torch.optim.AdamW(model.parameters())
        session = run.attach(model=model, optimizer=optimizer, blocked=blocked)
        session.begin()
        began_s = time.monotonic()
        session.step_done()
        session.step_done()  # no optimizer has stepped, so nothing waits for the provider
        assert run.page.get(HeartbeatField.SKIPPED_COUNT) == 1
        with pytest.raises(SnapshotWaitTimeout, match=r"after 0\.05 s: it is still copied"):
            session.wait("sealed", 0.05)
        assert time.monotonic() - began_s < TIMEOUT_S / 2
        blocked.go_on.set()
        assert session.wait("committed", TIMEOUT_S)
        model(torch.ones(2, 300)).sum().backward()
        optimizer.step()
        session.step_done()
        assert session.wait("committed", TIMEOUT_S)
        assert run.committed_version().step == 3
