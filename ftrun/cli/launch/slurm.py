"""Reads the Slurm step of this process from its variables.

No index of a node or task is read, because a step that starts later on one node of the same job has
other indices and an older node list. `scontrol` is not needed, so that this works in a container
without it.

A requeued job keeps its id, so that its run keeps its name, journal and checkpoints. Names and
ports that belong to one start of the job contain the number of restarts. A process of an earlier
start that Slurm could not reach therefore cannot be confused with this start or remove its files.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ftrun.errors import UsageError
from ftrun.network.detect.leaf_switches import names_of_list

_MAX_STARTS = 10_000
_FIRST_PORT, _NUM_PORTS = 15000, 10000  # below Linux's ephemeral ports, above the well-known ports
_WORD = r"(?:[\w.-]|\[[\d,-]+\])+"
_GOOD_LIST = re.compile(f"{_WORD}(?:,{_WORD})*")


@dataclass(frozen=True, slots=True)
class SlurmStep:
    """A job step of several nodes with one task each."""

    cluster: str
    job_id: int
    step_id: int
    num_nodes: int
    node_list: str  # in Slurm's notation: `n[1-2,07-09],m3`
    node_name: str  # name of this node; may differ from its host name
    restarts: int = 0  # number of times that the job was requeued

    @property
    def first_node(self) -> str:
        found = expand_hosts(self.node_list)
        if len(found) != self.num_nodes:
            raise UsageError(
                f"SLURM_STEP_NODELIST is {self.node_list[:200]!r}, which names {len(found)} nodes, "
                f"and SLURM_STEP_NUM_NODES is {self.num_nodes}. Name one of the nodes with "
                "--rdzv-endpoint"
            )
        return found[0]

    @property
    def key(self) -> str:
        """Names this start of the step, uniquely among the clusters that share a home folder."""
        return self._key_of(self.restarts)

    @property
    def earlier_keys(self) -> list[str]:
        return [self._key_of(start) for start in range(min(self.restarts, _MAX_STARTS))]

    @property
    def port(self) -> int:
        """The same port on all nodes; it differs between concurrent steps and between restarts."""
        number = self.job_id * 101 + self.step_id + self.restarts * 1009
        return _FIRST_PORT + number % _NUM_PORTS

    def _key_of(self, restarts: int) -> str:
        name = f"{self.cluster}-{self.job_id}-{self.step_id}"
        return f"{name}-r{restarts}" if restarts else name


def slurm_step(variables: Mapping[str, str]) -> SlurmStep | None:
    """The step of this process if it has several nodes with one task each, else None."""
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEP_NUM_NODES", "SLURM_STEP_NUM_TASKS")
    numbers = [variables.get(name, "") for name in names]
    if not all(text.isdecimal() for text in numbers):
        return None
    job_id, step_id, num_nodes, num_tasks = (int(text) for text in numbers)
    if num_nodes < 2 or num_tasks != num_nodes:
        return None
    restarts = variables.get("SLURM_RESTART_COUNT", "")
    cluster = re.sub(r"[^A-Za-z0-9_-]+", "-", variables.get("SLURM_CLUSTER_NAME", "")).strip("-_")
    return SlurmStep(
        cluster=cluster or "slurm",
        job_id=job_id,
        step_id=step_id,
        num_nodes=num_nodes,
        node_list=variables.get("SLURM_STEP_NODELIST", ""),
        node_name=variables.get("SLURMD_NODENAME", ""),
        restarts=int(restarts) if restarts.isdecimal() else 0,
    )


def leaf_switch(variables: Mapping[str, str]) -> str:
    """Returns the leaf switch of this node, from `s0.s2.node7`; empty if Slurm reports none."""
    kinds = variables.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").split(".")
    names = variables.get("SLURM_TOPOLOGY_ADDR", "").split(".", maxsplit=max(0, len(kinds) - 1))
    is_known = len(kinds) == len(names) and kinds[-2:] == ["switch", "node"]
    return names[-2] if is_known else ""


def expand_hosts(text: str) -> list[str]:
    """Expands `n[1-2,07-09],m3` to names, in order; raises a UsageError for any other text."""
    names = names_of_list(text) if _GOOD_LIST.fullmatch(text) else []
    if not names:
        raise UsageError(f"{text[:200]!r} is no list of hosts such as n[1-2,07-09],m3")
    return names
