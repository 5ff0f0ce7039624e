"""A small world of ranks that call collectives, for the tests of the detectors.

Each rank runs the same program: per step it calls one collective in each of its groups, in order.
`play` advances all ranks until none can continue. A rank may stop, skip a call or never come.
"""

from dataclasses import dataclass, field

from ftrun.monitor.verdicts import CollectiveCall, ProcessGroupView, RankView

KEPT = 8


@dataclass
class World:
    """Ranks in a grid of data and tensor parallelism (and stages), with their groups."""

    data: int
    tensor: int = 1
    stages: int = 1
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        size = self.size
        if self.tensor > 1:
            for first in range(0, size, self.tensor):
                self.groups[f"tp{first}"] = tuple(range(first, first + self.tensor))
        per_stage = self.data * self.tensor
        for stage in range(self.stages):
            for column in range(self.tensor):
                first = stage * per_stage + column
                ranks = tuple(range(first, (stage + 1) * per_stage, self.tensor))
                self.groups[f"dp{first}"] = ranks
        self.groups["0"] = tuple(range(size))

    @property
    def size(self) -> int:
        return self.data * self.tensor * self.stages

    def own(self, rank: int) -> list[str]:
        """The groups of a rank, in the order in which it calls them in each step."""
        return [name for name, ranks in self.groups.items() if rank in ranks]


@dataclass
class Player:
    """One rank."""

    rank: int
    program: list[str]
    entered: dict[str, int] = field(default_factory=dict)
    done: int = 0
    inside: str = ""


def play(world: World, steps: int, stops: dict[int, int]) -> dict[int, Player]:
    """Advances all ranks until none can continue.

    Args:
        world: its ranks and groups.
        steps: number of steps.
        stops: ranks that stop, with the number of calls before it.
    """
    players = {r: Player(r, world.own(r) * steps) for r in range(world.size)}
    moved = True
    while moved:
        moved = False
        for player in players.values():
            moved |= _advance(player, players, world, stops)
    return players


def _advance(
    player: Player, players: dict[int, Player], world: World, stops: dict[int, int]
) -> bool:
    if player.inside:
        number = player.entered[player.inside]
        members = [players[rank] for rank in world.groups[player.inside]]
        if any(one.entered.get(player.inside, 0) < number for one in members):
            return False
        player.inside = ""
        player.done += 1
        return True
    if player.done >= stops.get(player.rank, len(player.program)):
        return False
    name = player.program[player.done]
    player.entered[name] = player.entered.get(name, 0) + 1
    player.inside = name
    return True


def views_of(
    world: World, players: dict[int, Player], *, unresponsive_s: float = 12.0, still_s: float = 6.0
) -> dict[int, RankView]:
    """The observations of the ranks."""
    return {
        rank: view(
            rank,
            step=player.done // len(world.own(rank)),
            unresponsive_s=unresponsive_s,
            still_s=still_s,
            groups=tuple(_group(world, player, name) for name in player.entered),
        )
        for rank, player in players.items()
    }


def _group(world: World, player: Player, name: str) -> ProcessGroupView:
    last = player.entered[name]
    calls = tuple(
        CollectiveCall(n, "all_reduce", "[8]") for n in range(max(1, last - KEPT + 1), last + 1)
    )
    waits = last if player.inside == name else 0
    return ProcessGroupView(name, name, world.groups[name], calls, waits, 5.0 if waits else 0.0)


def view(rank: int, **changes: object) -> RankView:
    """A rank that sleeps somewhere in its script."""
    known: dict[str, object] = {
        "pid": 1000 + rank,
        "process": "S",
        "step": 7,
        "unresponsive_s": 12.0,
        "still_s": 6.0,
        "stack": ("/home/me/train.py:42 in step", "/home/me/train.py:9 in <module>"),
    }
    return RankView(rank=rank, **{**known, **changes})  # type: ignore[arg-type]
