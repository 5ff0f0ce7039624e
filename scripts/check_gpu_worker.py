"""The worker of check_gpu.py: small trainings that kill themselves, and measurements.

Under ftrun: `exact`, `idle`, `memory`, `respawn`, `cost`, `auto`, `two`; alone: `reference`,
`rates`, `ring`, `nvml`, `xid`, `collectives` and `conformance`. All write lines to rank<N>.jsonl.
"""

import argparse
import json
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from bench_notes import Notes
from check_gpu_collectives import cost as collective_cost
from check_gpu_collectives import two
from check_gpu_device import (
    BACKENDS,
    access_illegally,
    assumptions,
    captured,
    free_bytes,
    holds,
    load,
    new_graph,
    nvml_facts,
    pinning,
    rates,
    wait,
    xid_facts,
)
from check_gpu_ring import measure as ring
from check_gpu_training import KILL_AT, Training, page, page_facts
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import ftrun
from ftrun import process_tree
from ftrun.wire.shared_memory.pages import CommandField, HeartbeatField, SharedPage
from ftrun.wire.transport.channel import short_socket_path
from ftrun.worker.context import worker_context
from ftrun.worker.session import Session

T = TypeVar("T")

SETTLE_S = 30.0
LEAST_STEPS = 100
"""Steps in which the share of snapshots is measured."""

LIST_S = 6.0
"""A list of timed steps ends after this time, so that a slow device has all lists."""

# --- costs ------------------------------------------------------------------------------------


class Costs:
    """A training with a large state: parameters and AdamW's moments, steps of about 0.3 s."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.device, self.step_s = args.device, args.seconds
        width = int((args.gb * 1e9 / 3 / 4 / 16) ** 0.5)
        layers = [torch.full((width, width), 1 / width, device=self.device) for _ in range(16)]
        self.layers = nn.ParameterList(layers)
        self.optimizer = torch.optim.AdamW(self.layers.parameters(), lr=1e-6, fused=True)
        self.data = torch.ones(64, width, device=self.device)
        side = 8192 if self.device == "cuda" else 64
        self.factor = torch.randn(side, side, device=self.device, dtype=torch.bfloat16)
        self.products = 0

    def train(self) -> None:
        x = self.data
        for layer in self.layers:
            x = x @ layer
        for _ in range(self.products):
            self.factor @ self.factor
        x.mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def timed(self, boundary: Callable[[], None], *, waits: bool = True) -> tuple[float, float]:
        """Seconds of the boundary on the host, and of the boundary with the step after it."""
        started_s = time.monotonic()
        boundary()
        called_s = time.monotonic()
        self.train()
        if waits:
            wait(self.device)
        return called_s - started_s, time.monotonic() - started_s

    def measure(self, rounds: int, notes: Notes) -> None:
        session = ftrun.attach(self.layers, self.optimizer)
        shared = page()
        assert shared is not None
        first_step_s = self.timed(session.begin)[1]
        if session.restored:
            begin_ns = shared.get(HeartbeatField.RESTORE_BEGIN_NS)
            restore_ns = shared.get(HeartbeatField.RESTORE_END_NS) - begin_ns
            notes.write("restored", restore_s=restore_ns / 1e9, first_step_s=first_step_s)
            return

        def skip() -> None:
            session.step_done(snapshot=False)

        self.calibrate()
        state = [*self.layers.parameters()]
        state += [tensor for one in self.optimizer.state.values() for tensor in one.values()]
        first_s = self.sealed(session.step_done, shared)
        notes.write("cost", bytes=sum(tensor.nbytes for tensor in state), first_s=first_s)

        def idle() -> float:
            self.timed(skip)
            return self.sealed(session.step_done, shared)

        def ahead() -> float:
            self.timed(skip, waits=False)
            return self.timed(session.step_done)[0]

        several(3, lambda: self.sealed(session.step_done, shared))  # the first ones are verified
        notes.write("cost", idle=several(5, idle))
        pairs = several(rounds, lambda: (*self.timed(session.step_done), self.timed(skip)[1]))
        for name, values in zip(("call", "with", "without"), zip(*pairs, strict=True), strict=True):
            notes.write("cost", **{name: values})
        notes.write("cost", ahead=several(5, ahead), **page_facts())
        self.sealed(session.step_done, shared)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)

    def measure_auto(self, periods: int, notes: Notes) -> None:
        """Steps between snapshots whose interval ftrun has chosen, over whole periods."""
        session, context = ftrun.attach(self.layers, self.optimizer), worker_context()
        assert context is not None
        shared, commands = context.page, context.commands
        self.timed(session.begin)
        self.calibrate()
        quiet_s = several(20, lambda: self.timed(lambda: session.step_done(snapshot=False))[1])

        def chosen() -> int:
            is_used = session.step > commands.get(CommandField.EVERY_FROM_STEP)
            return commands.get(CommandField.SNAPSHOT_EVERY) if is_used else 0

        end_s = time.monotonic() + SETTLE_S
        while time.monotonic() < end_s:  # until an interval is used from one snapshot to the next
            before = chosen()
            self.period(session, shared)
            if before and before == chosen():
                break
        periods_s: list[list[float]] = []
        while len(periods_s) < periods or sum(map(len, periods_s)) < LEAST_STEPS:
            periods_s.append(self.period(session, shared))
            quiet_s += periods_s[-1][2:-2]
            steps_s = [one for some in periods_s for one in some]
            found = {"every": [*map(len, periods_s)], "steps_s": steps_s, "quiet_s": quiet_s}
            notes.write("auto", found=found)

    def period(self, session: Session, shared: SharedPage) -> list[float]:
        """Steps until the next snapshot is sealed; the seconds of each."""
        count, found = shared.get(HeartbeatField.SEALED_COUNT), list[float]()
        while shared.get(HeartbeatField.SEALED_COUNT) == count:
            found.append(self.timed(session.step_done)[1])
        return found

    def sealed(self, boundary: Callable[[], None], shared: SharedPage) -> float:
        """Seconds from a boundary to the end of its copy, while nothing else runs."""
        count, started_ns = shared.get(HeartbeatField.SEALED_COUNT), time.monotonic_ns()
        for _ in range(15):  # the first boundaries allocate memory
            boundary()
            again_s = time.monotonic() + 3
            while time.monotonic() < again_s:
                if shared.get(HeartbeatField.SEALED_COUNT) > count:
                    return (shared.get(HeartbeatField.SEALED_NS) - started_ns) / 1e9
                time.sleep(0.0005)
        raise TimeoutError(f"no snapshot: {shared.note}")

    def calibrate(self) -> None:
        self.products = 20
        self.timed(lambda: None)  # the first products load their kernels
        self.products = 0
        plain_s, self.products = self.timed(lambda: None)[1], 20
        each_s = max(1e-5, (self.timed(lambda: None)[1] - plain_s) / self.products)
        self.products = max(0, int((self.step_s - plain_s) / each_s))


def several(count: int, measure: Callable[[], T]) -> list[T]:
    """At most this number of figures, and fewer of a slow device."""
    end_s, found = time.monotonic() + LIST_S, [measure()]
    while len(found) < count and time.monotonic() < end_s:
        found.append(measure())
    return found


# --- processes ---------------------------------------------------------------


class Sleeping(Dataset[int]):
    """Its workers never come back from the first item, so that only a signal ends them."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        time.sleep(3600)
        return index


def memory(device: str, path: Path, notes: Notes) -> None:
    """Fill 70 % of the free device memory; two children have sessions of their own."""
    generation = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    before = [json.loads(line) for line in path.read_text().splitlines()][:1]
    children = [pid for line in before for pid in line["children"]]
    left = [pid for pid in children if process_tree.state_of(pid) not in ("", "Z")]
    size = before[0]["bytes"] if before else int(0.7 * free_bytes(device))
    weight = torch.ones(1, device=device, requires_grad=True)
    state = torch.ones(size, dtype=torch.uint8, device=device)
    loader = DataLoader(Sleeping(), num_workers=2, worker_init_fn=lambda _: os.setsid())
    workers = iter(loader)
    children = [one.pid for one in multiprocessing.active_children()]
    time.sleep(0.5)  # until each child has its session
    facts = {"children": children, "left": left, "bytes": state.nbytes}
    notes.write("begun", generation=generation, pid=os.getpid(), **facts)
    optimizer = torch.optim.SGD([weight])
    weight.sum().backward()
    optimizer.step()
    wait(device)
    notes.write("step", generation=generation)
    next(workers)


# --- NCCL, respawn ------------------------------------------------------------------------------


def respawn(device: str, folder: Path, notes: Notes) -> None:
    """Steps without end, for kills from outside; a file named `facts` requests `facts`."""
    dist.init_process_group(BACKENDS.get(device, "gloo"))
    generation = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    notes.write("begun", generation=generation, pid=os.getpid())
    training, asked = Training("adamw", device), folder / "facts"
    model = DistributedDataParallel(training.model)
    session = ftrun.attach(model, training.optimizer)
    for step in session.steps(1 << 40):
        loss = model(torch.randn(training.shape, device=device)).square().mean()
        loss.backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
        session.report(loss=loss)
        wait(device)
        notes.write("step", step=step, generation=generation)
        if asked.exists():
            asked.unlink()
            notes.write("facts", generation=generation, found=facts(device))
        time.sleep(0.01)


def facts(device: str) -> dict[str, Any]:
    """An error of one part does not hide the others."""
    found: dict[str, Any] = {}
    for part in (recorder_facts, capture_facts):
        try:
            found |= part(device)
        except Exception as error:  # noqa: BLE001 - it is the finding
            found[part.__name__] = f"failed: {type(error).__name__}: {error}"[:300]
    return found


def ask(request: str, method: str = "POST") -> bytes:
    """The answer of torch's server in this rank."""
    context = worker_context()
    assert context is not None
    with closing(socket.socket(socket.AF_UNIX)) as link:
        link.settimeout(3.0)
        with short_socket_path(Path(context.launch.rank_socket)) as path:
            link.connect(path)
        head = f"{method} /handler/{request} HTTP/1.1\r\nHost: rank\r\nContent-Length: 0\r\n"
        link.sendall(f"{head}Connection: close\r\n\r\n".encode())
        answer = b""
        while part := link.recv(1 << 18):
            answer += part
    return answer.partition(b"\r\n\r\n")[2]


def recorder_facts(device: str) -> dict[str, Any]:
    """The class of the backend, and what the flight recorder answers."""
    backend: Any = dist.group.WORLD
    with suppress(RuntimeError):  # a group that is written in Python is its own backend
        backend = backend._get_backend(torch.device(device))
    handlers = json.loads(ask("", "GET"))
    found: dict[str, Any] = {"backend": type(backend).__name__, "handlers": handlers}
    for handler in ("fr_trace_json", "dump_nccl_trace_json"):
        if handler in handlers:
            entries = json.loads(ask(handler)).get("entries", [])
            found[handler] = {"entries": len(entries), "newest": entries[-1:]}
    return found


def capture_facts(device: str) -> dict[str, Any]:
    """Whether a request to the flight recorder ends the capture of a graph."""
    if new_graph(device) is None:
        return {}
    x = torch.ones(1 << 20, device=device)
    found: dict[str, Any] = {"late_loss_pinned": x[0].to("cpu", non_blocking=True).is_pinned()}
    recorder = "dump_nccl_trace_json"
    for request in ("", "fr_trace_json", f"{recorder}?includecollectives=false", recorder):
        graph = new_graph(device)
        dist.all_reduce(x)
        try:
            with captured(graph, device):
                x.mul_(2)
                if request:
                    ask(request)
                time.sleep(1.5)  # longer than the interval at which the agent asks
            graph.replay()
            wait(device)
            found[f"capture during {request or 'nothing'}"] = "intact"
        except (RuntimeError, OSError) as error:
            found[f"capture during {request or 'nothing'}"] = f"broken: {error}"[:200]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--variants", default="")
    parser.add_argument("--kill-rank", type=int, default=0)
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.3)
    args = parser.parse_args()
    rank = int(os.environ.get("RANK", "0"))
    path, device = args.folder / f"rank{rank}.jsonl", args.device
    notes = Notes(path)
    load(device)
    parts: dict[str, Callable[[], object]] = {
        "idle": lambda: time.sleep(args.seconds),
        "cost": lambda: Costs(args).measure(args.rounds, notes),
        "auto": lambda: Costs(args).measure_auto(args.rounds, notes),
        "collectives": lambda: collective_cost(device, notes),
        "two": lambda: two(device, args.variants.split(","), notes),
        "xid": lambda: notes.write("xid", found=xid_facts(illegal_access(args))),
        "illegal": lambda: access_illegally(device),
        "rates": lambda: plain_copies(device, notes),
        "ring": lambda: ring(device, args.gb, notes),
        "nvml": lambda: notes.write("nvml", found=nvml_facts()),
        "conformance": lambda: conformance(device, notes),
        "memory": lambda: memory(device, path, notes),
        "respawn": lambda: respawn(device, args.folder, notes),
        "exact": lambda: exact(args, notes, KILL_AT if rank == args.kill_rank else -1),
        "reference": lambda: exact(args, notes, -1),
    }
    parts[args.what]()


def illegal_access(args: argparse.Namespace) -> list[str]:
    """The command of a process that makes one."""
    words = [__file__, "illegal", "--folder", str(args.folder), "--device", args.device]
    return [sys.executable, *words]


def exact(args: argparse.Namespace, notes: Notes, kill_at: int) -> None:
    torch.use_deterministic_algorithms(True)
    for variant in args.variants.split(","):
        training = Training(variant, args.device)
        training.run(notes, kill_at, each=args.what == "reference")


def plain_copies(device: str, notes: Notes) -> None:
    notes.write("rates", found=rates(device))
    if device != "cpu":
        notes.write("rates", found=pinning(device))


def conformance(device: str, notes: Notes) -> None:
    for name, check in assumptions().items():
        notes.write("begun", name=name)
        notes.write("conformance", found={name: holds(check, device)})


if __name__ == "__main__":
    main()
