"""The scenario of a seed: the number of nodes, settings, duration and number of faults."""

from dataclasses import dataclass, replace
from random import Random

from made_settings import changed, made_settings

from ftrun.config.cluster import ClusterSize, MembershipSettings
from simulation.plots import LASTS_S, PLOTS

MODES = ("safety", "liveness")
_STRICT = 0.3
_SIZES = {"outvoted": ((1, 1, 2), (2, 2, 3)), "unfinished": ((1, 4, 0), (2, 5, 0), (3, 6, 0))}
"""Fewest and most nodes, and spares, by plot."""
_OTHER_SIZES = ((2, 2, 1), (1, 3, 0), (2, 3, 0), (2, 2, 2), (3, 5, 0), (3, 3, 2))


@dataclass(frozen=True)
class Scenario:
    """One seed's world before any fault."""

    mode: str
    num_nodes: int
    """Number of started nodes; it may be below or above the requested number."""
    late_nodes: int
    """Number of nodes that start later."""
    num_ranks: int
    settings: MembershipSettings
    every: int
    transfer_s: float
    """The longest time that a shard takes to another node."""
    step_s: float
    tick_s: float
    unruly: float
    """Probability that a message is lost, duplicated or late within a connection."""
    has_checkpoints: bool
    load_s: float
    """The longest time that reading a checkpoint takes."""
    num_faults: int
    faults_end_s: float
    num_left_off: int
    """Number of nodes that stay switched off when all else is repaired."""
    has_reports: bool = False
    """Heartbeats report each rank, as the real ones do; no decision depends on it."""
    plot: str = ""
    """A sequence of faults, in addition to the random ones; see plots.py."""


def draw(seed: int, mode: str) -> Scenario:
    random = Random(f"{seed}/scenario/{mode}")
    nodes = random.choices((1, 2, 3, 4, 5, 6, 7), (6, 22, 26, 20, 12, 8, 6))[0]
    spares = random.choices((0, 1, 2), (5, 4, 2) if nodes > 2 else (3, 2, 4))[0]
    is_elastic = nodes > 1 and random.random() < 0.4
    fewest = random.randint(1, nodes) if is_elastic else nodes
    cluster_size = ClusterSize(fewest, nodes, spares)
    is_live = mode == "liveness"
    is_strict = not is_live and random.random() < _STRICT
    has_checkpoints = random.random() < (0.5 if spares > nodes else 0.15)
    total = nodes + spares
    late = random.randint(0, nodes - fewest) if is_elastic and random.random() < 0.5 else 0
    late += random.random() < 0.2
    settings = made_settings(
        cluster_size,
        "n0",
        heartbeat_interval_s=0.5,
        pause_timeout_s=20.0,
        join_timeout_s=60.0,
        last_call_timeout_s=random.choice((1.0, 3.0)),
        max_failures_per_hour=3 if is_strict else 1000,
        erasure_data=random.choice((None, None, 1, 2, 3)),
        erasure_parity=random.choice((None, 1, 2)),
        has_checkpoints=has_checkpoints,
        answer_s=8.0,
        budget=random.choice((2, 4)) if is_strict else 1000,
        window_s=3600.0,
        backoff_initial_s=0.5,
        backoff_max_s=2.0,
        same_cause_limit=3 if is_strict else 1000,
        final_snapshot_timeout_s=2.0,
    )
    scenario = Scenario(
        mode=mode,
        num_nodes=total,
        late_nodes=min(late, total - 1),
        num_ranks=random.choice((1, 1, 2)),
        settings=settings,
        every=random.choice((1, 1, 2, 3)),
        transfer_s=random.choice((0.15, 0.15, 0.8)),
        step_s=random.choice((0.3, 0.6, 1.0)),
        tick_s=0.4,
        unruly=random.choice((0.002, 0.01)) if not is_live and random.random() < 0.2 else 0.0,
        has_checkpoints=has_checkpoints,
        load_s=random.choice((0.1, 12.0)),
        num_faults=random.randint(1, 8),
        faults_end_s=random.uniform(9.0, 16.0),
        num_left_off=random.choice((0, 0, 0, 1, 2)),
    )
    return _with_plot(scenario, Random(f"{seed}/plot/{mode}"))


def _with_plot(scenario: Scenario, random: Random) -> Scenario:
    """Some worlds are made for one sequence, and have few other faults."""
    plot = random.choices(("", *PLOTS), (1 - sum(PLOTS.values()), *PLOTS.values()))[0]
    if not plot:
        return scenario
    has_checkpoints = scenario.has_checkpoints
    if plot == "outvoted":
        # The memory of the members is unreachable, and without it no node continues.
        has_checkpoints = True
    cluster_size = ClusterSize(*random.choice(_SIZES.get(plot, _OTHER_SIZES)))
    settings = changed(
        scenario.settings, cluster_size=cluster_size, has_checkpoints=has_checkpoints
    )
    return replace(
        scenario,
        plot=plot,
        settings=settings,
        has_checkpoints=has_checkpoints,
        num_nodes=cluster_size.max_nodes + cluster_size.spares,
        late_nodes=0,
        transfer_s=0.8 if plot == "unfinished" else scenario.transfer_s,
        num_faults=random.choice((0, 0, 1)),
        faults_end_s=LASTS_S,
    )
