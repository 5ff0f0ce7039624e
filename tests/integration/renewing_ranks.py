"""Ranks whose peers are killed, and which train on with renewed groups; run by test_survivors.py.

One process imports torch and forks the ranks of each case. It plays the agent: it hosts a store per
generation, informs the ranks that their generation is over, and starts a rank in place of a dead
one. Each rank writes its state after each step to a file, in place of a snapshot.

    python renewing_ranks.py FOLDER CASE... -> one line of JSON per case
"""

import hashlib
import json
import os
import random
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from ftrun.worker.state.determinism import ready_order
from ftrun.worker.survivors import reset
from ftrun.worker.survivors.groups import ProcessGroups
from ftrun.worker.survivors.set_up import SetUp

TIMEOUT_S = 60.0
CONNECT = timedelta(seconds=30)


@dataclass(frozen=True)
class Kill:
    """A rank kills itself once."""

    rank: int
    step: int
    place: str  # `backward`, `optimizer` or `forward`


@dataclass(frozen=True)
class Case:
    """A job, and the kills in it."""

    build: Callable[["Rank"], None]
    world: int
    kills: tuple[Kill, ...]
    options: dict[str, Any] = field(default_factory=dict)
    steps: int = 6


# --- models ---------------------------------------------------------------------------------------

in_backward: list[Callable[[], None]] = []
"""Called in the middle of each backward."""


def marked(x: torch.Tensor) -> torch.Tensor:
    x.register_hook(on_backward)
    return x


def on_backward(_: torch.Tensor) -> None:
    for call in in_backward:
        call()


class Net(nn.Module):
    """Uses its layers in another order than it holds them, and one of them in some steps only."""

    def __init__(self, has_unused: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
        self.norm = nn.BatchNorm1d(64)
        self.drop = nn.Dropout(0.1)
        self.has_unused = has_unused
        self.register_buffer("scale", torch.full((64,), random.random()), persistent=False)

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        for at in (4, 2, 5, 0, 3, 1):
            if self.has_unused and at == 5 and step % 2:
                continue
            x = self.layers[at](x).tanh() * self.scale
            x = marked(x) if at == 0 else x
        return self.drop(self.norm(x))


class Sharded(nn.Module):
    """For FSDP2."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        for at, layer in enumerate(self.layers):
            x = x + self.drop(layer(x).tanh())
            x = marked(x) if at == 1 else x
        return x


def build_ddp(rank: "Rank") -> None:
    dist.init_process_group("gloo")
    # The random seed of rank 0, as many scripts send it.
    seed = [random.randrange(1 << 30)]
    dist.broadcast_object_list(seed, src=0)
    torch.manual_seed(seed[0])
    rank.seed = seed[0]
    total = torch.tensor([float(rank.rank + 1)])
    dist.all_reduce(total)
    assert total.item() == rank.world * (rank.world + 1) / 2
    torch.manual_seed(7)
    model = Net(bool(rank.case.options.get("find_unused_parameters")))
    dist.barrier()
    rank.model = DistributedDataParallel(model, bucket_cap_mb=0.03, **rank.case.options)
    rank.wrappers = {"model": rank.model}
    rank.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    rank.extra = dist.new_group(list(range(rank.world - 1)))


def build_fsdp(rank: "Rank") -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(7)
    shape = tuple(rank.case.options["mesh"])
    names = ("replicate", "shard")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = Sharded()
    if rank.case.options.get("is_split"):  # the second dimension holds parts of each layer
        plan = {"layers.0": ColwiseParallel(output_layouts=Replicate())}
        parallelize_module(model, mesh["shard"], plan)
        mesh = mesh["replicate"]
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    rank.model = fully_shard(model, mesh=mesh)
    dist.barrier()


CASES = {
    "ddp2": Case(build_ddp, 2, (Kill(1, 2, "backward"),)),
    "ddp3": Case(build_ddp, 3, (Kill(1, 2, "backward"), Kill(0, 4, "optimizer"))),
    "ddp3-two-at-once": Case(build_ddp, 3, (Kill(1, 2, "optimizer"), Kill(0, 2, "optimizer"))),
    "ddp3-first-buckets": Case(build_ddp, 3, (Kill(2, 1, "forward"),)),
    "ddp3-unused": Case(
        build_ddp, 3, (Kill(2, 3, "backward"),), {"find_unused_parameters": True}
    ),
    "ddp3-views": Case(
        build_ddp, 3, (Kill(0, 3, "backward"),), {"gradient_as_bucket_view": True}
    ),
    "fsdp2": Case(build_fsdp, 2, (Kill(1, 2, "backward"), Kill(0, 4, "forward")), {"mesh": [2]}),
    "split4": Case(
        build_fsdp, 4, (Kill(2, 2, "backward"),), {"mesh": [2, 2], "is_split": True}
    ),
    "ddp2-16-times": Case(
        build_ddp, 2, tuple(Kill(1, step, "backward") for step in range(1, 17)), steps=18
    ),
    "hsdp4": Case(
        build_fsdp, 4, (Kill(3, 2, "backward"), Kill(0, 4, "optimizer")), {"mesh": [2, 2]}
    ),
}  # fmt: skip


def used() -> dict[str, int]:
    """What this process has: threads, descriptors, KiB of memory of its own."""
    rollup = Path("/proc/self/smaps_rollup").read_text()
    kib = [int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Private_Dirty")]
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "kib": kib[0],
    }


# --- a rank ---------------------------------------------------------------------------------------


class Rank:
    """One rank's process: the script, and by hand what a session does."""

    model: Any
    seed = 0
    extra: Any = None
    scaler: Any = None

    def __init__(self, case: Case, rank: int, folder: Path, line: socket.socket) -> None:
        self.case, self.rank, self.world, self.folder = case, rank, case.world, folder
        self.line, self.kills = line, [one for one in case.kills if one.rank == rank]
        self.wrappers: dict[str, DistributedDataParallel] = {}
        self.losses: dict[int, str] = {}
        self.revoked = threading.Event()
        self.orders: list[Any] = []
        self.arrived = threading.Condition()
        self.step = 0
        self.used: list[dict[str, int]] = []

    def run(self, restore: int | None, generation: int) -> None:
        self.groups = ProcessGroups()
        load = None if restore is None else lambda: self.saved(restore)["set_up"]
        self.set_up = SetUp(self.groups, load, generation)
        threading.Thread(target=self.listen, daemon=True).start()
        # A rank that is set up alone has other random numbers, and gets those of its first set-up.
        random.seed(self.rank if restore is None else os.urandom(8))
        in_backward[:] = [lambda: self.maybe_die("backward")]
        self.case.build(self)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.set_up.finish()
        assert not self.set_up.problem, self.set_up.problem
        assert not self.set_up.unknown([*self.model.parameters(), *self.model.buffers()])
        assert not self.groups.problem, self.groups.problem
        assert not reset.problem_of([self.model])
        torch.manual_seed(11 + self.rank)
        if restore is None:
            self.save()
        else:
            self.say("ready")
            self.join()
        while self.step < self.case.steps:
            try:
                self.turn()
            except RuntimeError:
                if not self.revoked.wait(TIMEOUT_S):
                    raise
            if self.revoked.is_set():
                self.go_back()
        self.end()

    def turn(self) -> None:
        step = self.step
        generator = torch.Generator().manual_seed(1000 * step + self.rank)
        self.optimizer.zero_grad()
        self.maybe_die("forward")
        x = torch.randn(8, 64, generator=generator)
        loss = self.model(x, step).square().mean()
        if self.scaler is not None:
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.optimizer)
            self.maybe_die("optimizer")
            if self.rank < self.world - 1:
                dist.all_reduce(torch.ones(3), group=self.extra)
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            loss.backward()
            self.maybe_die("optimizer")
            self.optimizer.step()
        self.losses[step] = loss.item().hex()
        if self.revoked.is_set():
            return
        self.step += 1
        self.save()

    def die_in(self, place: str) -> bool:
        return Kill(self.rank, self.step, place) in self.kills

    def maybe_die(self, place: str) -> None:
        mark = self.folder / f"died-{self.rank}-{self.step}"
        if self.die_in(place) and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    # --- what the agent says

    def say(self, word: str) -> None:
        self.line.send(word.encode())

    def listen(self) -> None:
        while words := self.line.recv(1 << 16).decode().split():
            if words[0] == "revoke":
                self.revoked.set()
                self.groups.abort()
            else:
                with self.arrived:
                    self.orders.append([int(word) for word in words[1:]])
                    self.arrived.notify_all()
        os._exit(3)

    def go_back(self) -> None:
        self.groups.detach()
        assert not self.groups.problem, self.groups.problem
        for call in (lambda: dist.all_reduce(torch.ones(1)), dist.barrier):
            try:
                call()
            except RuntimeError:
                continue
            raise AssertionError("a parked rank communicates")
        self.say("parked")
        self.join()

    def join(self) -> None:
        with self.arrived:
            assert self.arrived.wait_for(lambda: self.orders, TIMEOUT_S)
            generation, port, step = self.orders.pop(0)
        self.revoked.clear()
        saved = self.saved(step)
        self.groups.stand_in()
        dist.barrier()  # has no effect
        scalers = [] if self.scaler is None else [self.scaler]
        orders = saved["orders"]
        assert not reset.order_problem(self.wrappers, orders)
        reset.reset([self.model], self.wrappers, orders, [self.optimizer], scalers)
        self.restore(saved)
        self.step = step
        store = dist.TCPStore("127.0.0.1", port, None, False, timeout=CONNECT)
        self.groups.renew(store, generation, CONNECT)
        digest = f"{self.groups.digest()} {self.set_up.origin} {reset.layout(self.wrappers)}"
        first = store.compare_set("digest", "", digest).decode()
        assert first == digest, (first, digest)
        torch.set_rng_state(saved["rng"])
        self.used.append(used())

    # --- state

    def tensors(self) -> list[torch.Tensor]:
        found = [*self.model.parameters(), *self.model.buffers()]
        for parameter in self.model.parameters():
            state = self.optimizer.state.get(parameter, {})
            found += [state[key] for key in sorted(state)]
        return [getattr(one, "_local_tensor", one).detach() for one in found]

    def save(self) -> None:
        orders = {}
        for name, ddp in self.wrappers.items():
            order, _ = ready_order(ddp)
            if order is not None and not ddp.find_unused_parameters:
                orders[name] = order
        state = {
            "tensors": [one.clone() for one in self.tensors()],
            "rng": torch.get_rng_state(),
            "orders": orders,
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "set_up": self.set_up.export(),
            "losses": self.losses,
        }
        path = self.folder / f"{self.rank}-{self.step}.new"
        torch.save(state, path)
        path.rename(path.with_suffix(".pt"))

    def saved(self, step: int) -> Any:
        return torch.load(self.folder / f"{self.rank}-{step}.pt", weights_only=False)

    def restore(self, saved: Any) -> None:
        if not self.optimizer.state and len(saved["tensors"]) > len(self.tensors()):
            for parameter in self.model.parameters():
                self.optimizer.state[parameter] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
        with torch.no_grad():
            for mine, its in zip(self.tensors(), saved["tensors"], strict=True):
                mine.copy_(its)
        if self.scaler is not None:
            self.scaler.load_state_dict(saved["scaler"])
        self.losses = dict(saved["losses"])

    def end(self) -> None:
        later = dist.new_group(list(range(self.world)))  # a group after a renewal
        total = torch.ones(1)
        dist.all_reduce(total, group=later)
        assert total.item() == self.world
        content = b"".join(one.contiguous().numpy().tobytes() for one in self.tensors())
        result = {
            "losses": [self.losses[step] for step in range(self.case.steps)],
            "state": hashlib.sha256(content).hexdigest(),
            "calls": sum(self.groups.calls().values()),
            "backend": str(dist.get_backend()),
            "used": self.used,
            "groups": sorted(map(str, dist.distributed_c10d._world.pg_names.values())),
        }
        (self.folder / f"{self.rank}.json").write_text(json.dumps(result))
        dist.destroy_process_group()
        self.say("done")


# --- the agent ------------------------------------------------------------------------------------


class Run:
    """All ranks of one run of a case."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case, self.folder, self.generation = case, folder, 0
        folder.mkdir()
        self.pids: dict[int, int] = {}
        self.lines: dict[int, socket.socket] = {}
        self.renewals_s: list[float] = []
        self.new_store()

    def new_store(self) -> None:
        self.generation += 1
        self.store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)

    def start(self, rank: int, restore: int | None = None) -> None:
        mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        mine.settimeout(TIMEOUT_S)
        pid = os.fork()
        if pid == 0:
            mine.close()
            for line in self.lines.values():
                line.close()
            os.environ.update(
                RANK=str(rank), WORLD_SIZE=str(self.case.world), LOCAL_RANK=str(rank),
                MASTER_ADDR="127.0.0.1", MASTER_PORT=str(self.store.port),
                TORCHELASTIC_USE_AGENT_STORE="True",
            )  # fmt: skip
            code = 1
            try:
                Rank(self.case, rank, self.folder, its).run(restore, self.generation)
                code = 0
            except BaseException:  # noqa: BLE001
                traceback.print_exc()
            sys.stderr.flush()
            os._exit(code)
        its.close()
        self.pids[rank], self.lines[rank] = pid, mine

    def run(self) -> dict[int, Any]:
        for rank in range(self.case.world):
            self.start(rank)
        try:
            while self.pids:
                self.one_end()
        finally:
            for pid in self.pids.values():
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        ranks = range(self.case.world)
        return {one: json.loads((self.folder / f"{one}.json").read_text()) for one in ranks}

    def one_end(self) -> None:
        pid, status = os.waitpid(-1, 0)
        rank = next(rank for rank, one in self.pids.items() if one == pid)
        del self.pids[rank]
        self.lines.pop(rank).close()
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
            time.sleep(0.05)  # another one may die in the same moment
            self.renew([rank, *self.dead()])
        elif status:
            raise RuntimeError(f"rank {rank} ended with {status}")

    def dead(self) -> list[int]:
        found = []
        for rank, pid in list(self.pids.items()):
            if os.waitpid(pid, os.WNOHANG)[0]:
                del self.pids[rank]
                self.lines.pop(rank).close()
                found.append(rank)
        return found

    def renew(self, dead: list[int]) -> None:
        begin = time.monotonic()
        staying = list(self.lines.values())
        for line in staying:
            line.send(b"revoke")
        for line in staying:
            assert line.recv(100) == b"parked"
        step = next(
            step
            for step in range(self.case.steps, -1, -1)
            if all((self.folder / f"{r}-{step}.pt").exists() for r in range(self.case.world))
        )
        self.new_store()
        for rank in dead:
            self.start(rank, step)
        for rank in dead:
            assert self.lines[rank].recv(100) == b"ready"
        for line in self.lines.values():
            line.send(f"join {self.generation} {self.store.port} {step}".encode())
        self.renewals_s.append(time.monotonic() - begin)


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    for name in sys.argv[2:]:
        case = CASES[name]
        calm = Run(replace(case, kills=()), folder / f"{name}-calm").run()
        begin = time.monotonic()
        killed = Run(case, folder / f"{name}-killed")
        result = killed.run()
        print(
            json.dumps({
                "case": name, "calm": calm, "killed": result, "took_s": time.monotonic() - begin,
                "renewals": killed.generation - 1,
            }),
            flush=True,
        )  # fmt: skip


if __name__ == "__main__":
    main()
