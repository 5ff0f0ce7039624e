"""A training of one step that prints the memory that its restore needed.

Arguments: `rules` (plain tensors, manually sharded) or `fsdp`, and the step to train to. The output
is the peak of this process's own memory (no shared memory) during the attach, minus its memory
before and the optimizer's state that it has now.
"""

import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from torch import nn
from torch.distributed.fsdp import fully_shard

import ftrun
import ftrun.worker.reshard.engine
import ftrun.worker.snapshot_session

LAYERS, WIDTH = 24, 1024
KIND, STEPS = sys.argv[1], int(sys.argv[2])
POLL_S = 0.001


def own_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


class Peak:
    """The peak of this process's own memory during a block."""

    def __enter__(self) -> "Peak":
        self.before = self.most = own_bytes()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._poll)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ends.set()
        self._thread.join()

    def _poll(self) -> None:
        while not self._ends.wait(POLL_S):
            self.most = max(self.most, own_bytes())


class Cut(nn.Module):
    """Layers, each sharded along its rows."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.w = nn.ParameterList(torch.ones(WIDTH // size, WIDTH) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([(w @ x.T).square().mean() for w in self.w]).sum()


dist.init_process_group("gloo")
size = dist.get_world_size()
if KIND == "rules":
    Path("rows.yaml").write_text(
        f"mesh: {{tp: {size}}}\nshard: [{{name: 'model.*', axis: tp, dim: 0}}]\n"
    )
    dist.barrier()
    model: nn.Module = Cut(size)
else:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
declared = {"layout": "rows.yaml", "mesh": {"tp": size}} if KIND == "rules" else {}
with Peak() as peak:
    session = ftrun.attach(model=model, optimizer=optimizer, **declared)
state = [t for values in optimizer.state.values() for t in values.values()]
local = [t.to_local() if hasattr(t, "to_local") else t for t in state]
state_bytes = sum(t.numel() * t.element_size() for t in local)
print(f"loaded step={session.step} state={state_bytes} "
      f"extra={peak.most - peak.before - state_bytes}\n", end="", flush=True)  # fmt: skip
for _ in session.steps(STEPS):
    optimizer.zero_grad()
    model(torch.ones(2, WIDTH)).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
