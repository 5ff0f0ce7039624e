"""A long operation in a training without a fault: `patient_training.py WHAT SECONDS`.

Two ranks under DDP. Each kind of long operation is one function; the run must finish without a
restart, however late a step is.
"""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import ftrun

AT = 12
STEPS = 20
WHAT, LONG_S = sys.argv[1], float(sys.argv[2])
UNATTACHED = WHAT == "unattached"


class SlowOnce(Dataset[Tensor]):
    """One batch comes late, from a worker that waits for its disk."""

    def __len__(self) -> int:
        return STEPS * 4

    def __getitem__(self, index: int) -> Tensor:
        if WHAT == "slow-data" and index == AT * 4:
            time.sleep(LONG_S)
        return torch.full((16,), float(index))


class SlowFile:
    """A file on a slow storage."""

    def __init__(self) -> None:
        self._left_s = LONG_S

    def write(self, data: bytes) -> int:
        time.sleep(self._left_s)
        self._left_s = 0.0
        return len(data)

    def flush(self) -> None:
        pass


def compute(seconds: float) -> None:
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        torch.randn(200, 200) @ torch.randn(200, 200)


def compute_in_one_call(seconds: float) -> None:
    """One long call into C: a sort of a large number of values."""
    started_s = time.monotonic()
    torch.randn(1 << 20).sort()
    once_s = time.monotonic() - started_s
    torch.randn(max(1, int(seconds / once_s)), 1 << 20).sort()


def take_long(rank: int, session: ftrun.Session | None) -> None:
    """Do the operation at one step."""
    is_first = rank == 0
    if (WHAT == "eval-here" and is_first) or WHAT == "eval-everywhere":
        compute(LONG_S)
    elif WHAT == "eval-said" and is_first and session is not None:
        with session.phase("eval"):
            time.sleep(LONG_S)  # another process evaluates
    elif WHAT == "checkpoint" and is_first:
        torch.save({"weights": torch.zeros(1000)}, SlowFile())  # type: ignore[arg-type]
    elif WHAT == "long-batch" and is_first:
        compute_in_one_call(LONG_S)
    elif WHAT == "busy-thread" and is_first:
        worker = threading.Thread(target=compute, args=(LONG_S,))
        worker.start()
        worker.join()
    elif WHAT == "other-process" and is_first:
        subprocess.run([sys.executable, "-c", f"import time; time.sleep({LONG_S})"], check=True)
    elif WHAT == "download" and is_first:
        read_slowly(LONG_S)


def read_slowly(seconds: float) -> None:
    """Read from a peer that sends a little all the time."""
    reader, writer = os.pipe()

    def send() -> None:
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            os.write(writer, bytes(8192))
            time.sleep(0.1)
        os.close(writer)

    threading.Thread(target=send).start()
    while os.read(reader, 8192):
        pass


def batches(session: "ftrun.Session | None", loader: "DataLoader[Tensor]") -> Iterator[Tensor]:
    yield from loader if session is None else session.batches(loader)


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    if WHAT == "slow-start":
        time.sleep(LONG_S)
    model = DistributedDataParallel(nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    if WHAT == "compile":
        model.compile()  # type: ignore[no-untyped-call]
    loader = DataLoader(SlowOnce(), batch_size=4, num_workers=int(WHAT == "slow-data"))
    session = None if UNATTACHED else ftrun.attach(model=model, optimizer=optimizer, loader=loader)
    for step, batch in enumerate(batches(session, loader)):
        if WHAT == "first-step" and step == 0 and rank == 0:
            time.sleep(LONG_S)
        if step == AT:
            take_long(rank, session)
            print(f"late rank={rank}", flush=True)
            if UNATTACHED and rank == 0:
                compute(LONG_S)
        if WHAT == "uneven" and rank == 1:
            time.sleep(LONG_S / 8)
        if WHAT in ("stands-still", "starved", "clock-jump"):
            time.sleep(0.1)
        loss = model(batch).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"end rank={rank} generation={os.environ['TORCHELASTIC_RESTART_COUNT']}", flush=True)


if __name__ == "__main__":
    main()
