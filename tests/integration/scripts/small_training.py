"""A small training with everything an exact resume depends on; it writes each loss to a file.

Arguments: folder for the losses, steps or epochs, then switches: ddp, fsdp, workers, persistent,
stateful, epochs, long (passes), late-ddp, batchnorm, accumulate, amp, two-devices, an option of
AdamW (foreach, fused, capturable), die=STEP (SIGKILL after that number of iterations of this
process), kill=RANK:STEP:PLACE (SIGKILL of a rank in a step, once in a run; PLACE is forward,
backward, optimizer, or end), pace=SECONDS (in each step).

The training is on torch's default device.
"""

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import ftrun

OPTIONS = ("foreach", "fused", "capturable")


class Numbers(Dataset):
    """Samples without random draws."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.arange(8, dtype=torch.float32) * (index + 1) / 40
        return x.sin(), x.cos()[:4]


class OnSecondDevice(nn.Sequential):
    """Layers on the second device of the default type; the input is on the first one."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.to(self.device())

    def device(self) -> str:
        kind = torch.get_default_device().type
        return kind if kind == "cpu" else f"{kind}:1"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.to(self.device())).to(x.device)


def model_of(switches: set[str]) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.2)]
    layers += [nn.BatchNorm1d(32)] if "batchnorm" in switches else []
    wide = nn.Linear(32, 300)
    layers += [OnSecondDevice(wide) if "two-devices" in switches else wide]
    return nn.Sequential(*layers, nn.Tanh(), nn.Linear(300, 4))


def loader_of(switches: set[str], rank: int, world_size: int) -> DataLoader:
    data = Numbers(160 if "long" in switches else 40)
    sampler = DistributedSampler(data, world_size, rank, seed=3) if world_size > 1 else None
    workers = 2 if "workers" in switches else 0
    kind = DataLoader
    if "stateful" in switches:
        from torchdata.stateful_dataloader import StatefulDataLoader

        kind = StatefulDataLoader
    return kind(
        data,
        batch_size=4,
        sampler=sampler,
        shuffle=sampler is None,
        num_workers=workers,
        persistent_workers="persistent" in switches,
    )


def sharded(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    fully_shard(model[0])
    return fully_shard(model)


def in_ddp(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.002)


class Training:
    """One step after another; each loss goes to the file of this process."""

    def __init__(self, switches: set[str], rank: int, world_size: int) -> None:
        self.kind = torch.get_default_device().type
        self.is_mixed, self.accumulates = "amp" in switches, "accumulate" in switches
        self.plain = model_of(switches)
        if world_size > 1:
            dist.init_process_group(os.environ.get("TRAINING_BACKEND", "gloo"))
        if "fsdp" in switches:
            sharded(self.plain)
        is_late = "late-ddp" in switches
        self.model = in_ddp(self.plain) if "ddp" in switches and not is_late else self.plain
        options = {name: True for name in OPTIONS if name in switches}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, **options)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 50)
        self.scaler = torch.amp.GradScaler(self.kind, enabled=self.is_mixed)
        self.loader = loader_of(switches, rank, world_size)
        names = ("model", "optimizer", "scheduler", "scaler", "loader")
        self.session = ftrun.attach(**{name: getattr(self, name) for name in names})
        if is_late:
            self.model = in_ddp(self.plain)

    def step(self, batch: list[torch.Tensor], reach: Callable[[str], None]) -> torch.Tensor:
        is_odd = self.session.step % 2 == 1
        if not (self.accumulates and is_odd):
            self.optimizer.zero_grad()
        x, y = batch
        noise = random.random() * 1e-3 + np.random.rand() * 1e-3
        with torch.autocast(self.kind, torch.bfloat16, enabled=self.is_mixed):
            wide = self.plain[0].register_forward_hook(
                lambda *given: given[2].register_hook(lambda _: reach("backward")) and None
            )
            loss = nn.functional.mse_loss(self.model(x + noise), y)
            wide.remove()
        reach("forward")
        self.scaler.scale(loss).backward()
        if not self.accumulates or is_odd:
            self.scaler.step(self.optimizer)
            self.scaler.update()
            reach("optimizer")
            self.scheduler.step()
        return loss


def killed_at(switches: set[str], folder: Path, rank: int, step: int) -> Callable[[str], None]:
    """Returns a function that is called at each place of a step."""
    orders = [one[5:].split(":") for one in switches if one.startswith("kill=")]
    wanted = {place for r, s, place in orders if (int(r), int(s)) == (rank, step)}

    def reach(place: str) -> None:
        if place in wanted:
            try:
                (folder / f"killed.{rank}.{step}").touch(exist_ok=False)
            except FileExistsError:
                return
            os.kill(os.getpid(), signal.SIGKILL)

    return reach


def main() -> None:
    folder, total = Path(sys.argv[1]), int(sys.argv[2])
    switches = set(sys.argv[3:])
    die_after = next((int(s[4:]) for s in switches if s.startswith("die=")), -1)
    pace_s = next((float(s[5:]) for s in switches if s.startswith("pace=")), 0.0)
    world_size, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    torch.manual_seed(7)
    np.random.seed(7)
    random.seed(7)
    training = Training(switches, rank, world_size)
    session = training.session
    turns = 0
    with (folder / f"loss.{rank}.{session.generation}").open("a", buffering=1) as log:
        for _epoch in session.epochs(total):
            for batch in session.batches(training.loader):
                with session.guard():
                    reach = killed_at(switches, folder, rank, session.step)
                    loss = training.step(batch, reach)
                    if not session.is_rehearsal:
                        log.write(f"{session.step + 1} {loss.item().hex()}\n")
                    turns += 1
                    if turns == die_after:
                        os.kill(os.getpid(), signal.SIGKILL)
                    reach("end")
                    time.sleep(pace_s)
    tensors = training.plain.state_dict().values()
    state = [one.to_local() if hasattr(one, "to_local") else one for one in tensors]
    torch.save([session.step, [one.cpu() for one in state]], folder / f"end.{rank}.pt")
    if world_size > 1:
        dist.barrier()
        dist.destroy_process_group()


main()
