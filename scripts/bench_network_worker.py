"""The worker of bench_network.py on each node: all-reduces, bare or as the steps of a training.

sweep    without a launcher: the same processes run all orders in turns
train    under ftrun, until the file `go` exists; with snapshots, each rank has its own state, so
         that nothing is a replica

One all-reduce is timed from a barrier until this rank has the sum, whose value is checked.
"""

import argparse
import datetime
import itertools
import json
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from bench_notes import Notes
from torch import Tensor, nn

TIMEOUT = datetime.timedelta(seconds=300)


def main() -> None:
    args = parse_arguments()
    data = torch.empty(int(args.mb * 1e6 / 4))
    if args.what == "sweep":
        sweep(args, data)
        return
    dist.init_process_group("gloo", timeout=TIMEOUT)
    notes = Notes(args.folder / f"rank{dist.get_rank()}.jsonl")
    generation = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    notes.write_begun(generation)
    # A collective decision: no rank waits alone in a collective.
    end = torch.zeros(1)
    for step in steps(args):
        seconds = reduce_once(data)
        notes.write("step", step=step, generation=generation, seconds=seconds)
        end.fill_((args.folder / "go").exists())
        dist.all_reduce(end)
        if end.item():
            return


def sweep(args: argparse.Namespace, data: Tensor) -> None:
    """This node's part in each order, identified by its number."""
    own = int(args.node)
    orders: list[list[int]] = json.loads(args.orders)
    notes = Notes(args.folder / f"node{own}.jsonl")
    host, _, port = args.store.partition(":")
    store = dist.TCPStore(host, int(port), is_master=own == 0, timeout=TIMEOUT)
    for turn in range(args.rounds):
        for which, order in enumerate(orders):
            dist.init_process_group(
                "gloo",
                store=dist.PrefixStore(f"{turn}.{which}", store),
                rank=order.index(own),
                world_size=len(order),
                timeout=TIMEOUT,
            )
            notes.write("reduced", turn=turn, order=which, seconds=reduce_once(data))
            dist.barrier()
            dist.destroy_process_group()


def reduce_once(data: Tensor) -> float:
    """Seconds."""
    data.fill_(1.0)
    dist.barrier()
    started_s = time.monotonic()
    dist.all_reduce(data)
    took_s = time.monotonic() - started_s
    if not bool((data == dist.get_world_size()).all()):
        raise RuntimeError("an all-reduce gave a wrong sum")
    return took_s


def steps(args: argparse.Namespace) -> Iterator[int]:
    if not args.state_mb:
        yield from itertools.count()
        return
    own = nn.Linear(1, 1, bias=False)
    size = (int(args.state_mb * 1e6 / 4), 1)
    own.weight = nn.Parameter(torch.full(size, 1.0 + dist.get_rank()))
    own.weight.grad = torch.ones(size)
    optimizer = torch.optim.SGD(own.parameters(), lr=1e-6)
    for step in its_steps(own, optimizer, attach=args.attach):
        yield step
        optimizer.step()


def its_steps(model: nn.Module, optimizer: torch.optim.Optimizer, *, attach: bool) -> Iterable[int]:
    if not attach:
        return itertools.count()
    import ftrun

    return ftrun.attach(model=model, optimizer=optimizer).steps(1 << 40)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("sweep", "train"))
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--mb", type=float, required=True, help="MB of the all-reduce")
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--state-mb", type=float, default=0.0)
    parser.add_argument("--attach", action="store_true", help="take snapshots of the state")
    parser.add_argument("--orders", help="JSON: lists of nodes")
    parser.add_argument("--node")
    parser.add_argument("--store", metavar="HOST:PORT")
    return parser.parse_args()


if __name__ == "__main__":
    main()
