"""The worker of bench_snapshot.py: a training with a large state, of its own or equal on each rank.

Steps with no snapshot, with ftrun's and with those of its peers run in turns, in blocks, in one
process. A step is timed from one boundary to the next, so that it contains the whole cost of the
snapshot at its beginning. Writes the raw times to rank<N>.json; bench_snapshot.py computes the
figures.
"""

import argparse
import json
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
import torch.distributed as dist
from bench_notes import Notes, arguments
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import async_save

import ftrun
from ftrun.wire.shared_memory.pages import HeartbeatField, SharedPage
from ftrun.worker.context import worker_context

LAYERS = 16
COPIES = 5
WARM_STEPS = 3
FIRST_SNAPSHOTS = 12
IDLE_SNAPSHOTS = 8
SEAL_WAIT_S = 30.0
PEERS = ("torch.save", "async_save")


class Layers(nn.Module):
    """Square layers, one after the other."""

    def __init__(self, state_bytes: int, offset: float, device: torch.device) -> None:
        super().__init__()
        # Parameters and AdamW's two moments make up the state; 4 bytes each.
        self.width = int((state_bytes / 3 / 4 / LAYERS) ** 0.5)
        value = torch.full((self.width, self.width), 1.0 / self.width + offset, device=device)
        self.layers = nn.ParameterList(nn.Parameter(value.clone()) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x @ layer
        return x.mean()


class Worker:
    """One rank's training, and its measurements."""

    def __init__(self, args: argparse.Namespace) -> None:
        dist.init_process_group("gloo")
        self.args = args
        self.rank = dist.get_rank()
        self.device = opened(args.device)
        # Equal ranks stay equal without DDP, because their data are equal too.
        offset = 0.0 if args.replicated else 1e-6 * self.rank
        self.model = Layers(int(args.mb * 1e6), offset, self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, fused=True)
        self.data = self.rows(16)
        context = worker_context()
        assert context is not None
        self.page: SharedPage = context.page
        self.train()  # the optimizer's state exists from here on
        self.session = ftrun.attach(model=self.model, optimizer=self.optimizer)
        self.peers = Peers(self)
        self.actions: dict[str, Callable[[], None]] = {
            "plain": lambda: self.session.step_done(snapshot=False),
            "ftrun": self.session.step_done,
            "torch.save": self.peers.torch_save,
            "async_save": self.peers.async_save,
        }
        self.samples: dict[str, list[dict[str, float]]] = {name: [] for name in self.actions}

    # --- training ------------------------------------------------------------------------------

    def rows(self, count: int) -> Tensor:
        return torch.ones(count, self.model.width, device=self.device)

    def wait(self) -> None:
        """Wait until the device has done the training's work; not for ftrun's copies."""
        if self.device.type != "cpu":
            torch.accelerator.current_stream(self.device).synchronize()

    def forward_backward(self) -> None:
        loss = self.model(self.data)
        self.optimizer.zero_grad(set_to_none=False)
        loss.backward()
        self.wait()

    def train(self) -> None:
        self.forward_backward()
        dist.all_reduce(torch.ones(1))  # keeps the ranks in step, as in any parallel training
        self.optimizer.step()

    def block(self, name: str, count: int) -> None:
        """Boundaries of one kind, each with the step that follows it."""
        action = self.actions[name]
        for _ in range(count):
            blocked_ns = self.page.get(HeartbeatField.BLOCKED_NS)
            started_s = time.monotonic()
            action()
            called_s = time.monotonic()
            self.train()
            self.samples[name].append(
                {
                    "call_s": called_s - started_s,
                    "step_s": time.monotonic() - started_s,
                    "blocked_s": (self.page.get(HeartbeatField.BLOCKED_NS) - blocked_ns) / 1e9,
                }
            )

    # --- measuring -----------------------------------------------------------------------------

    def state(self) -> list[Tensor]:
        found = [parameter.detach() for parameter in self.model.parameters()]
        for per_parameter in self.optimizer.state.values():
            found += [per_parameter["exp_avg"], per_parameter["exp_avg_sq"]]
        return found

    def copied(self) -> list[Tensor]:
        """As many bytes of the state as this rank copies in a snapshot."""
        every = dist.get_world_size() if self.args.replicated else 1
        return self.state()[self.rank % every :: every]

    def calibrate(self) -> None:
        """Choose the batch so that forward and backward take --times-copy as long as a copy."""
        copies = self.host_copies()
        copy_s = median(self.copy_s(copies) for _ in range(COPIES))
        del copies
        times_s = {}
        for batch in (16, 64):
            self.data = self.rows(batch)
            self.forward_backward()
            times_s[batch] = median(self.timed(self.forward_backward) for _ in range(3))
        per_row_s = max((times_s[64] - times_s[16]) / 48, 1e-6)
        wanted = 16 + (self.args.times_copy * copy_s - times_s[16]) / per_row_s
        batch_wanted = torch.tensor([max(1.0, wanted)])
        dist.all_reduce(batch_wanted)
        rows = int(batch_wanted.item()) // dist.get_world_size()
        self.data = self.rows(max(1, rows))

    def host_copies(self) -> list[Tensor]:
        """Memory for `copy_s`, used once."""
        copies = [torch.empty_like(tensor, device="cpu") for tensor in self.copied()]
        self.copy_s(copies)
        return copies

    def copy_s(self, copies: list[Tensor]) -> float:
        """A torch.Tensor.copy_ of the bytes of a snapshot to the host, on all ranks at once."""

        def copy() -> None:
            for target, source in zip(copies, self.copied(), strict=True):
                target.copy_(source)

        return self.timed(copy)

    def timed(self, function: Callable[[], None]) -> float:
        self.wait()
        dist.barrier()
        started_s = time.monotonic()
        function()
        return time.monotonic() - started_s

    def first_snapshots(self) -> tuple[list[float], list[float]]:
        """Duration of each of the first snapshots: from its boundary to its seal, and blocked."""
        found, blocked_s = [], []
        for _ in range(FIRST_SNAPSHOTS):
            count = self.page.get(HeartbeatField.SEALED_COUNT)
            blocked_ns = self.page.get(HeartbeatField.BLOCKED_NS)
            started_ns = time.monotonic_ns()
            self.step_until_sealed(count)
            found.append((self.page.get(HeartbeatField.SEALED_NS) - started_ns) / 1e9)
            blocked_s.append((self.page.get(HeartbeatField.BLOCKED_NS) - blocked_ns) / 1e9)
        return found, blocked_s

    def await_shares(self) -> None:
        """Step until every rank stores only its share, and a version of shares is committed."""
        give_up_s = time.monotonic() + SEAL_WAIT_S
        num_bytes = sum(tensor.nbytes for tensor in self.state())
        for _ in range(2):
            has_whole = 1
            while has_whole:
                self.step_until_sealed(self.page.get(HeartbeatField.SEALED_COUNT))
                is_whole = 2 * self.page.get(HeartbeatField.IMAGE_BYTES) > num_bytes
                counted = torch.tensor([int(is_whole)])
                dist.all_reduce(counted)
                has_whole = counted.item()
                if time.monotonic() > give_up_s:
                    raise TimeoutError(f"replicas are not shared: {self.page.note}")

    def step_until_sealed(self, count: int) -> None:
        """Step until every rank has sealed a snapshot; large memory is allocated in these steps."""
        give_up_s = time.monotonic() + SEAL_WAIT_S
        while True:
            self.session.step_done()
            self.train()
            sealed = torch.tensor([int(self.page.get(HeartbeatField.SEALED_COUNT) > count)])
            dist.all_reduce(sealed, op=dist.ReduceOp.MIN)
            if sealed.item():
                return
            self.check_time(give_up_s)

    def idle_snapshots(self) -> tuple[list[float], list[float]]:
        """Copies of snapshots while nothing else runs, in turns with copy_."""
        copies = self.host_copies()
        snapshots_s, copies_s = [], []
        for _ in range(IDLE_SNAPSHOTS):
            self.optimizer.step()
            self.wait()
            count = self.page.get(HeartbeatField.SEALED_COUNT)
            dist.barrier()
            self.session.step_done()
            started_ns = time.monotonic_ns()
            self.wait_for_seal(count)
            snapshots_s.append((self.page.get(HeartbeatField.SEALED_NS) - started_ns) / 1e9)
            copies_s.append(self.copy_s(copies))
        return snapshots_s, copies_s

    def wait_for_seal(self, count: int) -> None:
        give_up_s = time.monotonic() + SEAL_WAIT_S
        while self.page.get(HeartbeatField.SEALED_COUNT) == count:
            self.check_time(give_up_s)
            time.sleep(0.0005)

    def check_time(self, give_up_s: float) -> None:
        if time.monotonic() > give_up_s:
            raise TimeoutError(f"no seal within {SEAL_WAIT_S:.0f} s: {self.page.note}")

    def measure(self, notes: Notes) -> dict[str, Any]:
        self.calibrate()
        for _ in range(WARM_STEPS):
            self.actions["plain"]()
            self.train()
        first_s, first_blocked_s = self.first_snapshots()
        if self.args.replicated:
            self.await_shares()
        idle_s, copy_s = self.idle_snapshots()
        notes.write("warm", generation=0)
        others = ["ftrun", *(() if self.args.no_peers else PEERS)]
        for number in range(self.args.rounds):
            for name in others:
                self.block("plain", self.args.block)
                self.block(name, self.args.block)
                self.peers.finish()
            if self.rank == 0:
                print(f"round {number + 1} of {self.args.rounds}", flush=True)
        return {
            "bytes": sum(tensor.nbytes for tensor in self.state()),
            "copied_bytes": sum(tensor.nbytes for tensor in self.copied()),
            "batch": len(self.data),
            "forward_backward_s": median(self.timed(self.forward_backward) for _ in range(3)),
            "first_s": first_s,
            "first_blocked_s": first_blocked_s,
            "idle_s": idle_s,
            "copy_s": copy_s,
            "samples": self.samples,
            "saves_s": self.peers.saves_s,
            "peer_bytes": self.peers.most_bytes,
            "skipped": self.page.get(HeartbeatField.SKIPPED_COUNT),
            "discarded": self.page.get(HeartbeatField.DISCARDED_COUNT),
            "note": self.page.note,
        }


class Peers:
    """Other ways to save a state to tmpfs; each keeps the old file until the new one is done."""

    def __init__(self, worker: Worker) -> None:
        self.saves_s: dict[str, list[float]] = {name: [] for name in PEERS}
        self.most_bytes = dict.fromkeys(PEERS, 0)
        self._worker = worker
        self._folder: Path = worker.args.folder
        self._group = dist.new_group(backend="gloo")
        self._future: Future[Any] | None = None
        self._own_bytes = 0
        self._number = 0

    def _state(self) -> dict[str, Any]:
        worker = self._worker
        return {"model": worker.model.state_dict(), "optimizer": worker.optimizer.state_dict()}

    def torch_save(self) -> None:
        self._worker.session.step_done(snapshot=False)
        started_s = time.monotonic()
        file = self._folder / f"rank{self._worker.rank}.pt"
        torch.save(self._state(), file.with_suffix(".new"))
        self.saves_s["torch.save"].append(time.monotonic() - started_s)
        self._note_bytes("torch.save", file, file.with_suffix(".new"))
        file.with_suffix(".new").replace(file)

    def async_save(self) -> None:
        self._worker.session.step_done(snapshot=False)
        if not self._own_bytes:
            self._own_bytes = own_bytes()
        self._wait()
        self._number += 1
        folder = self._folder / f"dcp{self._number % 2}"
        started_s = time.monotonic()
        future = async_save(
            {f"rank{self._worker.rank}": self._state()},  # its own on each rank: no replicas
            storage_writer=FileSystemWriter(folder),
            process_group=self._group,
        )
        assert isinstance(future, Future)  # without a stager of the caller's own
        saves_s = self.saves_s["async_save"]
        future.add_done_callback(lambda _: saves_s.append(time.monotonic() - started_s))
        self._future = future

    def _wait(self) -> None:
        if self._future is not None:
            self._future.result()
            self._future = None
            rank = self._worker.rank
            files = [self._folder / f"dcp{i}" / f"__{rank}_0.distcp" for i in (0, 1)]
            self._note_bytes("async_save", *files)

    def _note_bytes(self, name: str, *files: Path) -> None:
        stored = sum(file.stat().st_size for file in files if file.exists())
        staged = max(0, own_bytes() - self._own_bytes) if name == "async_save" else 0
        self.most_bytes[name] = max(self.most_bytes[name], stored + staged)

    def finish(self) -> None:
        """End a block: no work continues in the next one, and no file uses memory."""
        self._wait()
        dist.barrier()
        if self._worker.rank == 0:
            for path in (*self._folder.glob("dcp?"), *self._folder.glob("rank?.pt")):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        dist.barrier()


def opened(name: str) -> torch.device:
    if name == "cpu":
        return torch.device(name)
    from fake_device import fake

    fake.load()
    fake.set_mode("threads", max_pause_us=0)
    return torch.device(name, 0)


def own_bytes() -> int:
    """Memory of this process that belongs to no file and no memfd."""
    found = psutil.Process().memory_info()
    return int(found.rss - found.shared)


def main() -> None:
    numbers = {"rounds": int, "block": int, "no_peers": int, "replicated": int}
    args = arguments(__doc__, mb=float, times_copy=float, device=str, **numbers)
    worker = Worker(args)
    notes = Notes(args.folder / f"rank{worker.rank}.jsonl")
    found = worker.measure(notes)
    (args.folder / f"rank{worker.rank}.json").write_text(json.dumps(found))
    dist.barrier()
    notes.write("measured", generation=0)


if __name__ == "__main__":
    main()
