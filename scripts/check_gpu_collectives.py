"""Collectives in the worker of check_gpu.py: what the recorder costs, and two ranks that hang.

Cases of a hang, in rank 1:
  stopped  the process is stopped by SIGSTOP
  gil      the main thread waits in C and holds the interpreter lock
  kernel   a kernel runs for minutes, so that the device of the other rank waits in a collective
  p2p      the process sleeps while the other rank waits to receive from it
"""

import os
import signal
import statistics
import time

import torch
import torch.distributed as dist
from bench_notes import Notes
from check_gpu_device import BACKENDS, keep_spinning, wait
from check_gpu_training import Training
from torch.nn.parallel import DistributedDataParallel

import ftrun
from ftrun.worker.process.in_process_faults import _keep_the_lock

CASES = ("stopped", "gil", "kernel", "p2p")
HANG_AT = 15
"""Steps of a generation before it hangs."""
LONG_S = 600.0
BATCHES = 9


def cases_of(device: str) -> list[str]:
    """Those that a device has.

    A CPU has no kernels. The device of the tests has only collectives, by a group of gloo whose
    members torch does not show: a rank of it that does not answer is not missed.
    """
    left_out = {"cpu": ("kernel",), "fake": ("p2p", "stopped")}.get(device, ())
    return [case for case in CASES if case not in left_out]


def cost(device: str, notes: Notes) -> None:
    """Microseconds of the host for one all_reduce: as started, and once timing is enabled."""
    backend = BACKENDS.get(device, "gloo")
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    found: dict[str, object] = {"call_us": call_us(device)}
    if os.environ.get("TORCH_FR_BUFFER_SIZE") != "0":
        try:
            dist.group.WORLD._enable_collectives_timing()  # type: ignore[union-attr]
            found["timed_us"] = call_us(device)
        except (AttributeError, RuntimeError) as error:
            found["not_timed"] = str(error)[:200]
    notes.write("collectives", found=found)
    dist.destroy_process_group()


def call_us(device: str) -> float:
    value, times_s = torch.ones(1, device=device), list[float]()
    count = 500 if device == "cuda" else 20
    for _ in range(BATCHES):
        wait(device)
        started_s = time.monotonic()
        for _ in range(count):
            dist.all_reduce(value)
        times_s.append((time.monotonic() - started_s) / count)
        wait(device)
    return 1e6 * statistics.median(times_s[1:])


def two(device: str, cases: list[str], notes: Notes) -> None:
    """Train on two devices; each generation hangs in another way, and the last one ends."""
    rank, generation = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if device != "cpu":
        torch.accelerator.set_device_index(rank)
    dist.init_process_group(BACKENDS.get(device, "gloo"))
    training = Training("adamw", device)
    model = DistributedDataParallel(training.model)
    session = ftrun.attach(model, training.optimizer)
    if "p2p" in cases:
        exchange(rank, device)  # makes the connection
    for count, step in enumerate(session.steps(1 << 40)):
        if count >= HANG_AT:
            if generation >= len(cases):
                break
            notes.write("hang", step=step, generation=generation)
            hang(cases[generation], rank, device)
        model(torch.randn(training.shape, device=device)).square().mean().backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
        wait(device)
        time.sleep(0.01)
    session.close()
    dist.destroy_process_group()


def exchange(rank: int, device: str) -> None:
    value = torch.ones(1 << 20, device=device)
    if rank:
        dist.send(value, dst=0)
    else:
        dist.recv(value, src=1)
    wait(device)


def hang(case: str, rank: int, device: str) -> None:
    if case == "p2p" and rank == 0:
        exchange(rank, device)
    if rank == 0:
        return  # it waits in the collective of the next step
    if case == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif case == "gil":
        _keep_the_lock(LONG_S)
    elif case == "kernel":
        keep_spinning(device, LONG_S)
    else:
        time.sleep(LONG_S)
