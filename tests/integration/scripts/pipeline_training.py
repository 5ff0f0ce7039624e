"""A small manually sharded pipeline on plain tensors; each stage numbers its layers from 0.

Arguments: stages, tensor-parallel size, layers of each run of layers (such as 2,3), the step to
train to, a file of layout rules, and `undeclared` if the script does not declare the rules. Rank =
stage * size + index. With more runs than stages, run r is the chunk r // stages of stage r %
stages. Each rank prints the state of all ranks, joined by code that does not use the rules.
"""

import hashlib
import sys

import torch
import torch.distributed as dist
from row_sum import Sum
from torch import nn

import ftrun

WIDTH, INNER, CLASSES = 12, 12, 5
STAGES, SIZE = int(sys.argv[1]), int(sys.argv[2])
RUNS = [int(count) for count in sys.argv[3].split(",")]
STEPS, RULES, DECLARED = int(sys.argv[4]), sys.argv[5], len(sys.argv) < 7
dist.init_process_group("gloo")
RANK, WORLD = dist.get_rank(), dist.get_world_size()
STAGE, INDEX = divmod(RANK, SIZE)
ROWS = [dist.new_group([stage * SIZE + at for at in range(SIZE)]) for stage in range(STAGES)]
ROW = ROWS[STAGE]


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) / 3


class Layer(nn.Module):
    """Its values depend on its number in the whole pipeline, which its name does not contain."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.ones(WIDTH) + number)
        self.up = nn.Parameter(random(10 + number, INNER, WIDTH).chunk(SIZE)[INDEX].clone())
        self.down = nn.Parameter(random(50 + number, WIDTH, INNER).chunk(SIZE, 1)[INDEX].clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = (Sum.apply(x * self.norm, False, ROW) @ self.up.T).tanh()
        return x + Sum.apply(inner @ self.down.T, True, ROW)


class Chunk(nn.Module):
    """One run of layers."""

    def __init__(self, run: int) -> None:
        super().__init__()
        first = sum(RUNS[:run])
        self.embed = nn.Parameter(random(1, CLASSES, WIDTH)) if run == 0 else None
        self.layers = nn.ModuleList(Layer(first + at) for at in range(RUNS[run]))
        is_last = run == len(RUNS) - 1
        self.head = nn.Parameter(random(2, CLASSES, WIDTH)) if is_last else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embed is not None:
            x = self.embed[x]
        for layer in self.layers:
            x = layer(x)
        return x if self.head is None else (x @ self.head.T).square().mean()


class Stage(nn.Module):
    """The runs of a rank, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.runs = range(STAGE, len(RUNS), STAGES)
        self.chunks = nn.ModuleList(Chunk(run) for run in self.runs)

    def step(self, tokens: torch.Tensor) -> float:
        """Forward and backward through all runs, one after the other; the loss, on its rank."""
        inside: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        x = tokens
        for run, chunk in zip(self.runs, self.chunks, strict=True):
            x = tokens if run == 0 else received(x, run - 1, len(tokens)).requires_grad_()
            inside[run] = (x, chunk(x))
            x = sent(inside[run][1].detach(), run + 1)
        loss = 0.0
        gradient = torch.zeros(())
        for run in reversed(self.runs):
            x, out = inside[run]
            if run == len(RUNS) - 1:
                loss = float(out.detach())
                out.backward()
            else:
                out.backward(received(gradient, run + 1, len(tokens)))
            gradient = sent(x.grad, run - 1) if run else gradient
        return loss


def sent(value: torch.Tensor, run: int) -> torch.Tensor:
    """Send to the rank of a run, if that is another one."""
    if 0 <= run < len(RUNS) and STAGES > 1:
        dist.send(value.contiguous(), run % STAGES * SIZE + INDEX)
    return value


def received(own: torch.Tensor, run: int, count: int) -> torch.Tensor:
    """Receive from the rank of a run; a local value, if there is no other rank."""
    if STAGES == 1:
        return own.detach()
    found = torch.empty(count, WIDTH)
    dist.recv(found, run % STAGES * SIZE + INDEX)
    return found


def digest(model: Stage, optimizer: torch.optim.Optimizer) -> str:
    """Digest of the whole state, independent of the names."""
    own: dict[str, bytes] = {}
    for run, chunk in zip(model.runs, model.chunks, strict=True):
        for name, parameter in chunk.named_parameters():
            if name.startswith("layers."):
                _, number, field = name.split(".")
                name = f"{sum(RUNS[:run]) + int(number)}.{field}"
            state = optimizer.state.get(parameter, {})
            for kind in ("value", "exp_avg", "exp_avg_sq"):
                local = parameter if kind == "value" else state.get(kind)
                if local is None:
                    continue
                parts: list[torch.Tensor] = [torch.empty(0)] * SIZE
                dist.all_gather_object(parts, local.detach().clone(), group=ROW)
                dim = {"up": 0, "down": 1}.get(name.rpartition(".")[2])
                whole = parts[0] if dim is None else torch.cat(parts, dim)
                own[f"{name} {kind}"] = whole.contiguous().numpy().tobytes()
            own[f"{name} step"] = str(float(state.get("step", 0))).encode()
    every: list[dict[str, bytes]] = [{}] * WORLD
    dist.all_gather_object(every, own)
    found = {name: data for one in every for name, data in one.items()}
    text = b"".join(name.encode() + found[name] for name in sorted(found))
    return f"{hashlib.sha256(text).hexdigest()[:16]} of={len(found)}"


model = Stage()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
declared = {"layout": RULES, "mesh": {"pp": STAGES, "tp": SIZE}} if DECLARED else {}
session = ftrun.attach(model=model, optimizer=optimizer, **declared)
print(f"begins step={session.step} digest={digest(model, optimizer)}\n", end="", flush=True)
loss = 0.0
for step in session.steps(STEPS):
    made = torch.Generator().manual_seed(step)
    optimizer.zero_grad()
    loss = model.step(torch.randint(CLASSES, (6,), generator=made))
    optimizer.step()
print(f"ends step={session.step} digest={digest(model, optimizer)} loss={loss:.3f}\n",
      end="", flush=True)  # fmt: skip
dist.destroy_process_group()
