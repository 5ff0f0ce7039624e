"""Trains with DDP and with FSDP2 on the fake device and on the processor, and compares the bytes.

Arguments: a file for the result.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from fake_device import collectives, fake
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

STEPS = 4


def sharded(layers: nn.Sequential, kind: str, sharding: str) -> nn.Module:
    if sharding == "ddp":
        return nn.parallel.DistributedDataParallel(layers, bucket_cap_mb=0.01)
    mesh = init_device_mesh(kind, (dist.get_world_size(),))
    fully_shard(layers[0], mesh=mesh)
    return fully_shard(layers, mesh=mesh)


def trained(kind: str, sharding: str) -> list[bytes]:
    """The local part of each parameter."""
    device = "fake:0" if kind == "fake" else "cpu"
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8)).to(device)
    model = sharded(layers, kind, sharding)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        x = torch.randn(16, 64, generator=generator).to(device)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    local = [
        one.to_local() if hasattr(one, "to_local") else one for one in model.state_dict().values()
    ]
    return [one.detach().cpu().numpy().tobytes() for one in local]


def main() -> None:
    fake.load()
    collectives.register()
    torch.set_num_threads(1)
    dist.init_process_group(collectives.BACKEND)
    found = {one: trained("fake", one) == trained("cpu", one) for one in ("ddp", "fsdp")}
    Path(sys.argv[1]).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
