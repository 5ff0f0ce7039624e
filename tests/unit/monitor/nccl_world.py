"""Sixteen ranks that train with pipeline, tensor and expert parallelism on devices.

The host of each rank runs ahead of its device. `play` advances all ranks until none can continue,
and `traces` gives what their flight recorders hold then: without start events, and with the counts
of the last call of each group, which may be a message, as in recorded incidents of Megatron.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

STAGES, EXPERTS, TENSOR = 4, 2, 2
SIZE = STAGES * EXPERTS * TENSOR
AHEAD = 24
"""Operations that a host calls before the oldest one is over."""

Op = tuple[str, str, int]
"""Group, name of the operation, peer (or -1 if it is a collective)."""


def stage_of(rank: int) -> int:
    return rank // (EXPERTS * TENSOR)


def groups_of(rank: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Description and ranks of each group of a rank, by name."""
    stage, column, pair = stage_of(rank), rank % (EXPERTS * TENSOR), rank // TENSOR
    wide = EXPERTS * TENSOR
    return {
        "0": ("default_pg", tuple(range(SIZE))),
        str(10 + pair): ("TENSOR", tuple(range(pair * TENSOR, (pair + 1) * TENSOR))),
        str(30 + stage): ("EXPERT", tuple(range(stage * wide, (stage + 1) * wide))),
        str(50 + column): ("PIPELINE", tuple(range(column, SIZE, wide))),
    }


def step_of(rank: int, *, is_shared: bool = False) -> list[Op]:
    """The operations of one step: forward, backward, and the sum of gradients.

    `is_shared`: messages are in the default group, which then has both kinds of operations.
    """
    default, tensor, expert, pipe = groups_of(rank)
    pipe = default if is_shared else pipe
    before, after = rank - EXPERTS * TENSOR, rank + EXPERTS * TENSOR
    layer: list[Op] = [
        (tensor, "_all_gather_base", -1),
        (expert, "all_to_all", -1),
        (expert, "all_to_all", -1),
        (tensor, "_reduce_scatter_base", -1),
    ]
    has_before, has_after = before >= 0, after < SIZE
    return [
        *([(pipe, "recv", before)] if has_before else []),
        *layer,
        *([(pipe, "send", after), (pipe, "recv", after)] if has_after else []),
        *layer,
        *([(pipe, "send", before)] if has_before else []),
        (default, "all_reduce", -1),
    ]


@dataclass(frozen=True)
class Fault:
    """What happens to a rank at its operation number `at`."""

    at: int
    is_of_device: bool
    """The device completes nothing from there on as far as the host can see; else the host calls
    nothing."""
    ahead: int = 12
    """Operations that the host still calls after a device fault."""


@dataclass
class Player:
    """One rank."""

    rank: int
    program: list[Op]
    keys: list[tuple[str, int, str]] = field(default_factory=list)
    """Of each operation: group, number within the group, direction of a message."""
    called: int = 0
    done: int = 0

    def __post_init__(self) -> None:
        counts: dict[tuple[str, bool], int] = {}
        links: dict[tuple[str, int, str], int] = {}
        for group, op, peer in self.program:
            if peer < 0:
                number = counts[group, False] = counts.get((group, False), 0) + 1
                self.keys.append((group, number, ""))
                continue
            way = (self.rank, peer) if op == "send" else (peer, self.rank)
            number = links[group, peer, op] = links.get((group, peer, op), 0) + 1
            self.keys.append((group, number, f"{way[0]}->{way[1]}"))

    def limit(self, fault: Fault | None) -> int:
        if fault is None:
            return len(self.program)
        return min(len(self.program), fault.at + (fault.ahead if fault.is_of_device else 0))

    def seen(self, fault: Fault | None) -> int:
        """Operations that are over as far as the host can see."""
        return min(self.done, fault.at) if fault is not None and fault.is_of_device else self.done


def play(steps: int, faults: Mapping[int, Fault], *, is_shared: bool = False) -> dict[int, Player]:
    """Advance all ranks until none can continue; a message is over when both ends have called."""
    players = {
        rank: Player(rank, step_of(rank, is_shared=is_shared) * steps) for rank in range(SIZE)
    }
    running: set[tuple[int, tuple[str, int, str]]] = set()
    moved = True
    while moved:
        moved = False
        for rank, player in players.items():
            fault = faults.get(rank)
            end = min(player.limit(fault), player.seen(fault) + AHEAD)
            moved |= end > player.called
            player.called = max(player.called, end)
            if player.done < player.called:
                running.add((rank, player.keys[player.done]))
        for rank, player in players.items():
            if player.done < player.called:
                group, _, way = key = player.keys[player.done]
                ends = way.split("->") if way else groups_of(rank)[group][1]
                if all((int(one), key) in running for one in ends):
                    player.done += 1
                    moved = True
    return players


def traces(
    players: Mapping[int, Player], faults: Mapping[int, Fault], *, only_active: bool = False
) -> dict[int, dict[str, Any]]:
    return {
        rank: _trace(player, faults.get(rank), only_active=only_active)
        for rank, player in players.items()
    }


def _trace(player: Player, fault: Fault | None, *, only_active: bool) -> dict[str, Any]:
    groups = groups_of(player.rank)
    ids = {name: 2 * index for index, name in enumerate(groups)}
    status = {name: [-1, -1] for name in groups}
    entries, numbers, messages = [], dict.fromkeys(groups, 0), dict.fromkeys(groups, 0)
    seen = player.seen(fault)
    for index, (group, op, peer) in enumerate(player.program[: player.called]):
        ranks = groups[group][1]
        number = player.keys[index][1] if peer < 0 else numbers[group]
        numbers[group], is_over = number, index < seen
        messages[group] += peer >= 0
        counted = number if peer < 0 else messages[group]
        status[group] = [counted, counted if is_over else status[group][1]]
        sign = "->" if op == "send" else "<-"
        ends = "" if peer < 0 else f" {ranks.index(player.rank)}{sign}{ranks.index(peer)}"
        if not (only_active and is_over):
            entries.append({
                "record_id": index, "pg_id": ids[group],
                "process_group": [group, groups[group][0]], "collective_seq_id": number,
                "p2p_seq_id": messages[group] if peer >= 0 else 0, "op_id": index,
                "profiling_name": f"nccl:{op}{ends}", "time_created_ns": index,
                "input_sizes": [[8, 2]], "retired": is_over,
                "state": "completed" if is_over else "scheduled",
                "time_discovered_started_ns": 0, "time_discovered_completed_ns": 0,
                "timeout_ms": 600000, "is_p2p": peer >= 0,
            })  # fmt: skip
    return {
        "version": "2.10",
        "pg_config": {
            name: {"name": name, "desc": desc, "ranks": json.dumps(list(ranks))}
            for name, (desc, ranks) in groups.items()
        },
        "pg_status": {
            str(ids[name]): {
                "last_enqueued_collective": str(called),
                "last_started_collective": "-1",
                "last_completed_collective": str(over),
            }
            for name, (called, over) in status.items()
        },
        "entries": entries,
    }
