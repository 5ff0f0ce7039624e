"""Trains some steps under torchrun's variables; each rank prints a digest of its state.

Arguments: `fake` or `cpu`, and `ddp` or `fsdp`.
"""

import hashlib
import sys

import torch
import torch.distributed as dist
from fake_device import collectives, fake
from torch import nn

STEPS = 4


def main() -> None:
    kind, sharding = sys.argv[1:]
    torch.set_num_threads(1)
    if kind == "fake":
        fake.load()
        collectives.register()
    dist.init_process_group(collectives.BACKEND if kind == "fake" else "gloo")
    rank, device = dist.get_rank(), "fake:0" if kind == "fake" else "cpu"
    torch.manual_seed(0)
    layers = [nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8)]
    model: nn.Module = nn.Sequential(*layers).to(device)
    if sharding == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(kind, (dist.get_world_size(),))
        fully_shard(model[0], mesh=mesh)  # type: ignore[index]
        fully_shard(model, mesh=mesh)
    else:
        model = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.01)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 * step + rank)
        x = torch.randn(16, 64, generator=generator).to(device)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = hashlib.sha256()
    for value in model.state_dict().values():
        local = value.to_local() if hasattr(value, "to_local") else value
        found.update(local.detach().cpu().numpy().tobytes())
    print(f"rank {rank}: {found.hexdigest()}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
