"""The variables that pass the choices of a network plan to the collective libraries.

Runs in:  every agent, for the ranks it starts. Pure.
Takes in: the plan; this node's interfaces by the run's names for rails; the user's environment.
Gives:    variables to add, never one that the user has set.

Source: torch's ProcessGroupGloo takes GLOO_SOCKET_IFNAME as a list of whole names, and all ranks
        must name equally many. NCCL takes NCCL_SOCKET_IFNAME and NCCL_IB_HCA as lists of name
        prefixes. With a leading =, the list contains whole names, so that eth1 does not match
        eth10.
"""

from collections.abc import Mapping

from ftrun.network.detect.rails import RunRails
from ftrun.wire.cluster.rails import NetworkPlan, Rail

GLOO = "GLOO_SOCKET_IFNAME"
NCCL = "NCCL_SOCKET_IFNAME"
HCA = "NCCL_IB_HCA"
VARIABLES = (GLOO, NCCL, HCA)


def env_for(
    plan: NetworkPlan, rails_of_node: Mapping[str, Rail], user_env: Mapping[str, str]
) -> dict[str, str]:
    """Variables for the ranks of one node.

    Args:
        plan: of the generation.
        rails_of_node: this node's interfaces, by the run's name of each rail.
        user_env: the environment of the ranks without a plan.
    """
    mine = [rails_of_node[name] for name in plan.rails if name in rails_of_node]
    if not mine or len(mine) < len(plan.rails):
        return {}
    names = ",".join(rail.name for rail in mine)
    wanted = {GLOO: names, NCCL: f"={names}"}
    if all(rail.hca for rail in mine):
        wanted[HCA] = "=" + ",".join(dict.fromkeys(rail.hca for rail in mine))
    return {name: value for name, value in wanted.items() if name not in user_env}


def rails_named(name: str, value: str, rails: RunRails) -> set[str]:
    """The rails of the run that such a variable names, on any node.

    Args:
        name: of the variable; other variables name no rail.
        value: as the user has set it: `eth0,eth1`, `=eth0`, `^eth1`, `mlx5_0:1`.
        rails: of the run.
    """
    if name not in VARIABLES:
        return set()
    is_not = value.startswith("^")
    value = value.removeprefix("^")
    is_whole = name == GLOO or value.startswith("=")
    wanted = [one.partition(":")[0] for one in value.removeprefix("=").split(",") if one]
    named = set()
    for rail, on in rails.items():
        here = {one.hca if name == HCA else one.name for one in on.values()} - {""}
        if any(
            one == word or (not is_whole and one.startswith(word))
            for one in here
            for word in wanted
        ):
            named.add(rail)
    return {*rails} - named if is_not else named
