"""Handwritten results of a network survey, with requested faults.

    made_network(nodes=8, leaves=2, slow={("node6", "eth1")}, cut={("node2", "node5", "eth0")})

Rates differ a little from path to path, equally in each run.
"""

from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from ftrun.network.detect.findings import judge
from ftrun.network.detect.leaf_switches import LeafSwitches
from ftrun.network.plan.planner import PlanningInputs, plan_network
from ftrun.wire.cluster.generation import PathMeasurement, Rail
from ftrun.wire.messages.status import plan_status

GBIT = 1e9 / 8


def made_network(  # noqa: PLR0913 - one for each thing that can be so
    nodes: int = 4,
    *,
    rails: Sequence[str] = ("eth0", "eth1"),
    leaves: int = 2,
    rate_per_s: float = 9.4 * GBIT,
    between: float = 1.0,
    slow: Collection[tuple[str, str]] = (),
    dead: Collection[tuple[str, str]] = (),
    cut: Collection[tuple[str, str, str]] = (),
    every: int = 1,
    mode: str = "report",
    is_applied: bool = False,
) -> dict[str, Any]:
    """The part `network` of a status document.

    Args:
        nodes: node0, node1 ...; they are attached to their leaves in turn.
        rails: their names; one network each.
        leaves: 0: not known.
        rate_per_s: of a path inside a leaf, in bytes.
        between: ratio of the rate of a path between two leaves to that rate.
        slow: node and rail, which sends and receives with a tenth of the rate.
        dead: node and rail that no node reaches.
        cut: source, destination and rail of single dead paths.
        every: one of this number of paths was probed, by the distance of its ends.
        mode: of --network-plan.
        is_applied: the plan is.
    """
    names = [f"node{number}" for number in range(nodes)]
    leaf = {name: f"leaf{number % leaves}" for number, name in enumerate(names)} if leaves else {}
    paths = []
    for rail in rails:
        for a, source in enumerate(names):
            for b, other in enumerate(names):
                if a == b or (b - a) % every:
                    continue
                ends = {(source, rail), (other, rail)}
                path: dict[str, Any] = {"source": source, "destination": other, "rail": rail}
                if ends & set(dead) or (source, other, rail) in cut:
                    path["problem"] = "no answer within 0.5 s"
                else:
                    far = bool(leaf) and leaf[source] != leaf[other]
                    part = (between if far else 1.0) * (0.1 if ends & set(slow) else 1.0)
                    part *= 1 - ((7 * a + 3 * b) % 11) / 300
                    path["bytes_per_s"] = rate_per_s * part
                    path["rtt_s"] = 1e-6 * (60 + 25 * far + (5 * a + 2 * b) % 9)
                paths.append(path)
    cards = {name: [_rail(rail, number, own) for own, rail in enumerate(rails)]
             for number, name in enumerate(names)}  # fmt: skip
    known = (
        LeafSwitches(leaf, "labels", words="Leaf switches are the nodes' labels.") if leaf else None
    )
    situation = PlanningInputs(
        nodes=names,
        rails=msgspec.convert(cards, dict[str, list[Rail]]),
        found=msgspec.convert(paths, list[PathMeasurement]),
        leaves=known or LeafSwitches(words="No node has a label."),
    )
    found = judge(situation.rails, situation.found, leaf).found
    return {
        "mode": mode,
        "probed_s": 1.2,
        "age_s": 33.0,
        "coverage": len(paths) / max(nodes * (nodes - 1) * len(rails), 1),
        "rails": cards,
        "paths": paths,
        "findings": [
            {"kind": one.kind.value, "culprit": one.culprit, "sentence": one.sentence}
            for one in found
        ],
        "plan": msgspec.to_builtins(plan_status(plan_network(situation))),
        "is_applied": is_applied,
    }


def _rail(name: str, node: int, rail: int) -> dict[str, Any]:
    host = f"10.{rail}.{node // 250}.{1 + node % 250}"
    return {"name": name, "host": host, "prefix_bits": 16, "port": 29400, "speed_mbit": 10_000,
            "duplex": "full"}  # fmt: skip
