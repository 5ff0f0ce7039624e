#!/usr/bin/env python3
"""Train a small GPT on the source of Python's standard library, byte by byte.

    python scripts/train_gpt.py                            one process, a session without snapshots
    torchrun --nproc-per-node 2 scripts/train_gpt.py       two ranks, the same
    ftrun --nproc-per-node 2 scripts/train_gpt.py          two ranks that survive failures

The script is the same for all three. The lines with `session` and `ftrun` are its only use of
ftrun: it attaches the state that changes from step to step, and loops over `session.steps`. A rank
that dies is replaced, and the run continues with the same result: every loss, and the digest of the
parameters that is printed last, are equal to the last bit.
"""

import argparse
import hashlib
import json
import math
import os
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its name everywhere
from torch.nn.parallel import DistributedDataParallel

import ftrun

BYTES = 256


class Block(nn.Module):
    """Attention to previous positions, then two layers for each position."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.before_attention = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.before_layers = nn.LayerNorm(width)
        self.layers = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.before_attention(x))
        more: Tensor = self.layers(self.before_layers(x))
        return x + more

    def attend(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.query_key_value(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        out: Tensor = self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


class GPT(nn.Module):
    """Predicts the next byte from those before it."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.byte = nn.Embedding(BYTES, args.width)
        self.position = nn.Embedding(args.context, args.width)
        self.dropout = nn.Dropout(args.dropout)
        blocks = (Block(args.width, args.heads, args.dropout) for _ in range(args.layers))
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(args.width)
        self.next_byte = nn.Linear(args.width, BYTES, bias=False)

    def forward(self, text: Tensor, following: Tensor) -> Tensor:
        """The loss; both are [batch, context], `following` one byte further on."""
        positions = torch.arange(text.shape[1], device=text.device)
        x = self.blocks(self.dropout(self.byte(text) + self.position(positions)))
        guess = self.next_byte(self.norm(x))
        return F.cross_entropy(guess.view(-1, BYTES), following.reshape(-1))


def main() -> None:
    args = parse_arguments()
    rank, device = start()
    torch.manual_seed(args.seed)  # the same first parameters on all ranks
    model: nn.Module = GPT(args).to(device)
    size = sum(parameter.numel() for parameter in model.parameters())
    if dist.is_initialized():
        model = DistributedDataParallel(model)
    torch.manual_seed(args.seed + 1 + rank)  # dropout, and so all later random numbers, differ
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up_then_cosine(args))
    order = torch.Generator().manual_seed(args.seed + 1 + rank)
    source = standard_library()

    session = ftrun.attach(model=model, optimizer=optimizer, scheduler=scheduler, order=order)

    if rank == 0 and session.step == 0:
        print(f"{size / 1e6:.2f} M parameters, {len(source) / 1e6:.2f} MB of source", flush=True)
    for step in session.steps(args.steps):
        loss = model(*batch(source, order, args, device))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        scheduler.step()
        if rank == 0:
            send(step, loss.item(), args)

    if rank == 0:
        print(f"parameters sha256 {digest(model)}", flush=True)
        log(args, digest=digest(model))
    if dist.is_initialized():
        dist.destroy_process_group()


def start() -> tuple[int, torch.device]:
    """Join the other ranks, if there are any; this rank and its device."""
    rank = int(os.environ.get("RANK", "0"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return rank, device


def standard_library() -> Tensor:
    """All modules at the top of the standard library, one after the other, as bytes."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"\0".join(file.read_bytes() for file in files)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def batch(
    source: Tensor, order: torch.Generator, args: argparse.Namespace, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Parts of the source at random places, which `order` chooses, each with its next byte."""
    starts = torch.randint(len(source) - args.context - 1, (args.batch, 1), generator=order)
    pieces = source[starts + torch.arange(args.context + 1)].long().to(device)
    return pieces[:, :-1], pieces[:, 1:]


def warm_up_then_cosine(args: argparse.Namespace) -> Callable[[int], float]:
    """Factor on the learning rate at each step."""

    def factor(step: int) -> float:
        if step < args.warm_up:
            return (step + 1) / float(args.warm_up)
        done = (step - args.warm_up) / max(1, args.steps - args.warm_up)
        return 0.1 + 0.45 * (1.0 + math.cos(math.pi * min(1.0, done)))

    return factor


def send(step: int, loss: float, args: argparse.Namespace) -> None:
    """The loss rounded for readers and exact for comparison."""
    if step % args.print_every == 0 or step == args.steps - 1:
        print(f"step {step:4d}  loss {loss:.4f}  {loss.hex()}", flush=True)
    log(args, step=step, loss=loss.hex())


def log(args: argparse.Namespace, **fields: object) -> None:
    """Append one JSON line to the file, for a later comparison."""
    if args.losses is not None:
        generation = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        with args.losses.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**fields, "generation": generation}) + "\n")


def digest(model: nn.Module) -> str:
    """One number for all parameters: equal only if every bit of them is."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(parameter.detach().cpu().numpy().tobytes())
    return found.hexdigest()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    size = parser.add_argument_group("the model")
    option(size, "--layers", int, 4, "number of blocks")
    option(size, "--width", int, 192, "width of each block")
    option(size, "--heads", int, 6, "number of attention heads")
    option(size, "--context", int, 128, "context length in bytes")
    option(size, "--dropout", float, 0.1, "dropout rate")
    how = parser.add_argument_group("the training")
    option(how, "--steps", int, 200, "number of steps")
    option(how, "--batch", int, 4, "sequences per rank")
    option(how, "--lr", float, 2e-3, "peak learning rate")
    option(how, "--warm-up", int, 20, "warm-up steps")
    option(how, "--seed", int, 0, "random seed")
    out = parser.add_argument_group("the output")
    option(out, "--print-every", int, 20, "interval of printed losses, in steps")
    out.add_argument(
        "--losses", type=Path, help="append each exact loss to this file, as JSON lines"
    )
    return parser.parse_args()


def option(group: Any, flag: str, kind: type, default: object, text: str) -> None:
    help_text = f"{text} (default %(default)s)"
    group.add_argument(flag, type=kind, default=default, help=help_text)


if __name__ == "__main__":
    main()
