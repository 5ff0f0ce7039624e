"""A small manually sharded training: tensor parallel within a row, data parallel across rows.

Arguments: the tensor-parallel size (of each generation, such as 2,4; all: every rank there is), the
step to train to, a file of layout rules if the run must continue from other layouts by itself, and
`noted` to record every step, slowly until the file `go` exists. Rank = data index * size + index.
Each rank prints its state, joined from all ranks of its row by code that does not use the rules.
"""

import hashlib
import json
import os
import socket
import sys
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from row_sum import Sum
from torch import nn

import ftrun

VOCABULARY, PAD_TO, WIDTH, HEADS, HEAD, INNER = 50, 4, 24, 4, 4, 20
"""Four groups of heads: two queries, one key and one value each."""

SIZES, STEPS, NOTED = sys.argv[1].split(","), int(sys.argv[2]), len(sys.argv) > 4
dist.init_process_group("gloo")
RANK, WORLD = dist.get_rank(), dist.get_world_size()
GENERATION = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
SIZE = int(SIZES[min(GENERATION, len(SIZES) - 1)].replace("all", str(WORLD)))
DATA, INDEX = divmod(RANK, SIZE)
ROWS = [dist.new_group([d * SIZE + at for at in range(SIZE)]) for d in range(WORLD // SIZE)]
COLUMNS = [dist.new_group([d * SIZE + at for d in range(WORLD // SIZE)]) for at in range(SIZE)]
ROW, COLUMN = ROWS[DATA], COLUMNS[INDEX]


def share(units: int) -> tuple[int, int]:
    """The first unit of this rank, and their number; the first ranks have one more."""
    step, more = divmod(units, SIZE)
    return INDEX * step + min(INDEX, more), step + (more > INDEX)


def cut(whole: torch.Tensor, dim: int, sizes: Sequence[int], unit: Sequence[int]) -> nn.Parameter:
    """Of each of several joined parts, the units of this rank."""
    found = []
    for part, one in zip(whole.split(list(sizes), dim), unit, strict=True):
        first, count = share(part.shape[dim] // one)
        found.append(part.narrow(dim, first * one, count * one))
    return nn.Parameter(torch.cat(found, dim).clone())


class Net(nn.Module):
    """Embedding, fused projections, gated layer; every size is uneven on three ranks."""

    QKV = ([2 * HEADS * HEAD, HEADS * HEAD, HEADS * HEAD], [2 * HEAD, HEAD, HEAD])

    def __init__(self) -> None:
        super().__init__()
        made = torch.Generator().manual_seed(5)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=made) / 4

        rows = -(-VOCABULARY // (PAD_TO * SIZE)) * PAD_TO
        table = torch.full((rows * SIZE, WIDTH), 9.0)  # padding that must not be mistaken for rows
        table[:VOCABULARY] = random(VOCABULARY, WIDTH)
        self.embed = nn.Parameter(table[INDEX * rows : (INDEX + 1) * rows].clone())
        self.norm = nn.Parameter(torch.ones(WIDTH))
        self.qkv = cut(random(4 * HEADS * HEAD, WIDTH), 0, *self.QKV)
        self.out = cut(random(WIDTH, 2 * HEADS * HEAD), 1, [2 * HEADS * HEAD], [2 * HEAD])
        self.gate_up = cut(random(2 * INNER, WIDTH), 0, [INNER, INNER], [1, 1])
        self.down = cut(random(WIDTH, INNER), 1, [INNER], [1])
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen += torch.tensor([1.0, RANK])
        first = INDEX * len(self.embed)
        here = (tokens >= first) & (tokens < first + len(self.embed))
        found = self.embed[torch.where(here, tokens - first, 0)] * here[..., None]
        x = Sum.apply(found, True, ROW)
        x = x + self.attention(nn.functional.layer_norm(x, [WIDTH], self.norm))
        gate, up = (Sum.apply(x, False, ROW) @ self.gate_up.T).chunk(2, -1)
        return x + Sum.apply((nn.functional.silu(gate) * up) @ self.down.T, True, ROW)

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        groups = len(self.qkv) // (4 * HEAD)
        parts = (Sum.apply(x, False, ROW) @ self.qkv.T).split(
            [2 * groups * HEAD, groups * HEAD, groups * HEAD], -1
        )
        q, k, v = (part.unflatten(-1, (-1, HEAD)).transpose(1, 2) for part in parts)
        k, v = (one.repeat_interleave(2, 1) for one in (k, v))
        found = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return Sum.apply(found @ self.out.T, True, ROW)


def whole(name: str, local: torch.Tensor) -> torch.Tensor:
    """A tensor joined from all ranks of the row, without padding."""
    parts: list[torch.Tensor] = [torch.empty(0)] * SIZE
    dist.all_gather_object(parts, local.detach().clone(), group=ROW)
    if name == "norm":
        assert all(torch.equal(part, parts[0]) for part in parts)
        return parts[0]
    if name == "embed":
        return torch.cat(parts)[:VOCABULARY]
    if name in ("out", "down"):
        return torch.cat(parts, 1)
    count = 3 if name == "qkv" else 2
    weights = [2, 1, 1] if name == "qkv" else [1, 1]
    cuts = [part.split([len(part) * w // sum(weights) for w in weights]) for part in parts]
    return torch.cat([torch.cat([one[at] for one in cuts]) for at in range(count)])


def digest(model: Net, optimizer: torch.optim.Optimizer) -> str:
    found = hashlib.sha256()
    for name, parameter in model.named_parameters():
        state = optimizer.state.get(parameter, {})
        for one in (parameter, state.get("exp_avg"), state.get("exp_avg_sq")):
            if one is not None:
                found.update(whole(name, one).contiguous().numpy().tobytes())
        found.update(str(float(state.get("step", 0))).encode())
    return found.hexdigest()[:16]


def note(kind: str, step: int) -> None:
    """Record the current state of this rank, for the test."""
    if NOTED:
        where = {"generation": GENERATION, "node": socket.gethostname(), "pid": os.getpid()}
        reported = {
            "ns": time.monotonic_ns(),
            "kind": kind,
            "step": step,
            "size": SIZE,
            **where,
        }
        with open(f"rank{RANK}.jsonl", "a", buffering=1) as notes:
            notes.write(json.dumps({**reported, "digest": digest(model, optimizer)}) + "\n")
        if not os.path.exists("go"):
            time.sleep(0.1)


model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
declared = {"layout": sys.argv[3], "mesh": {"tp": SIZE}} if len(sys.argv) > 3 else {}
session = ftrun.attach(model=model, optimizer=optimizer, **declared)
print(f"begins step={session.step} digest={digest(model, optimizer)} seen={model.seen.tolist()}\n",
      end="", flush=True)  # fmt: skip
note("begun", session.step)
loss = torch.zeros(())
for step in session.steps(STEPS):
    tokens = torch.randint(
        VOCABULARY, (3, 7), generator=torch.Generator().manual_seed(step * 100 + DATA)
    )
    optimizer.zero_grad()
    loss = (model(tokens) - 0.5).square().mean()
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=COLUMN)
        parameter.grad /= WORLD // SIZE
    optimizer.step()
    note("step", step + 1)
note("end", session.step)
print(f"ends step={session.step} digest={digest(model, optimizer)} loss={float(loss):.3f}\n",
      end="", flush=True)  # fmt: skip
dist.destroy_process_group()
