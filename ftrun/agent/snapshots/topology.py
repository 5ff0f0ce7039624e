"""Builds the messages about a plan for this node's SMP, and chooses checkpoints to resume from.

Pure, except for the memory of `AgentSmpClient` that it reads.

Rule 1: SMPs identify themselves by a digest of their group with its addresses. An address is
        therefore computed from the plan alone, so that every node computes the same.
Rule 2: the checkpoints of the run itself come first. With `--resume never` or a path, a failure
        after its first checkpoint does not take the run back to its start.
Rule 3: checkpoints of other runs in the directory count with `auto` only, also later in the run.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from ftrun.agent.snapshots.smp_client import AgentSmpClient
from ftrun.config.run_spec import RunSpec
from ftrun.ids import Rank, Version
from ftrun.network.detect.rails import match_rails
from ftrun.snapshot.load_shares import ranks_at
from ftrun.urls import is_url, without_password
from ftrun.wire.checkpoint_owner import CheckpointClaim
from ftrun.wire.cluster.generation import GenerationPlan, NodeCard, Rail
from ftrun.wire.messages.checkpoint import INDEX_NAME, LoadCheckpoint
from ftrun.wire.messages.smp import BeginGeneration, NodeAddress, PreviousGroup


@dataclass(frozen=True, slots=True)
class CheckpointSource:
    """A directory of checkpoints, or its URL, and which of them count."""

    directory: str
    only: str = ""
    """The name of one checkpoint; empty: any."""
    life: str = ""
    """The life of the run that has written it; empty: any."""

    @property
    def no_metrics_reason(self) -> str:
        where = without_password(self.directory)
        if self.life:
            return f"this run has written no checkpoint in {where} yet"
        return f"no checkpoint in {where} yet"


def sources_of(spec: RunSpec, life: str, *, has_committed: bool) -> list[CheckpointSource]:
    """The sources, in the order in which they are tried.

    If the run has committed snapshots and writes no checkpoints, the checkpoint that it started
    from is no source, because that would discard all later steps without an error.
    """
    directory, path = spec.checkpoint_directory, spec.resume_path
    is_auto = spec.profile.checkpoint.resume == "auto"
    found = [CheckpointSource(directory, life="" if is_auto else life)] if directory else []
    if path is not None and (directory or not has_committed):
        found.append(_named(path))
    return found


def _named(path: str) -> CheckpointSource:
    """One checkpoint, or a directory of them; the last part of a URL says which of the two."""
    if is_url(path):
        directory, _, name = path.rstrip("/").rpartition("/")
        is_one = name == "latest" or name.startswith("step-")
        return CheckpointSource(directory, only=name) if is_one else CheckpointSource(path)
    real = os.path.realpath(path)  # DIR/latest is a link
    if os.path.exists(os.path.join(real, INDEX_NAME)):
        directory, name = os.path.split(real)
        return CheckpointSource(directory, only=name)
    return CheckpointSource(real)


def begin_generation(
    plan: GenerationPlan,
    node_id: str,
    spec: RunSpec,
    restored: Version | None,
    smp: AgentSmpClient,
    *,
    previous_world_size: int,
) -> BeginGeneration:
    """The message that begins a generation at this node's SMP.

    `restored` may also be the newest commit in its middle; `previous_world_size` 0: the same as
    now.
    """
    node = plan.member(node_id)
    ranks = list(node.ranks) if node is not None else []
    group = next((ids for ids in plan.groups if node_id in ids), [])
    version = (restored.generation, restored.step) if restored is not None else None
    places = _Places(plan)
    paths = plan.paths
    return BeginGeneration(
        generation=plan.generation,
        world_size=plan.world_size,
        local_ranks=ranks,
        group=[places.of(one) for one in group] if ranks else [],
        node_id=node_id,
        parity=plan.parity,
        is_ring=plan.is_ring,
        small_state_bytes=spec.profile.erasure.mirror_max_bytes,
        restored=version,
        restored_world_size=previous_world_size,
        protected_in=plan.protected_in(node_id),
        restore_from=_sources(places, ranks, restored, smp, previous_world_size),
        read_from=_readable(places, ranks, restored),
        pace_bytes_s=float(paths.snapshot_bytes_per_s) if paths is not None else 0.0,
        own=None if ranks and group else places.of(node_id),
        claim=claim_of(plan, node_id, spec),
        memory_limit_bytes=spec.profile.snapshot.limit_bytes,
    )


def claim_of(plan: GenerationPlan, node_id: str, spec: RunSpec) -> CheckpointClaim | None:
    node, directory = plan.member(node_id), spec.checkpoint_directory
    if directory is None or node is None or 0 not in node.ranks:
        return None
    inherits = spec.profile.checkpoint.resume == "auto"
    return CheckpointClaim(directory, plan.life, len(plan.voters), inherits)


def load_order(
    plan: GenerationPlan,
    node_id: str,
    source: CheckpointSource,
    smp: AgentSmpClient,
    claim: CheckpointClaim | None,
    memory_limit_bytes: int,
) -> LoadCheckpoint:
    ids = [node.node_id for node in plan.members]
    ranks = [list(node.ranks) for node in plan.members]
    # A load is shared only if every SMP is reachable, so that no SMP waits for another in vain.
    is_shared = len(ids) > 1 and smp.port > 0 and all(plan.smp_ports.get(one) for one in ids)
    return LoadCheckpoint(
        source.directory,
        plan.world_size,
        ranks[ids.index(node_id)],
        source.only,
        source.life,
        ranks if is_shared else [],
        ids.index(node_id) if is_shared else 0,
        plan.history.bad_checkpoints,
        claim if claim is not None and claim.directory == source.directory else None,
        memory_limit_bytes,
        smp.had_pools,
    )


class _Places:
    """The addresses of the SMPs of a plan's nodes."""

    def __init__(self, plan: GenerationPlan) -> None:
        self.plan = plan
        wanted = plan.paths.snapshot_rail if plan.paths is not None else ""
        of_nodes = {card.node_id: card.rails for card in plan.voters} if wanted else {}
        self._first: Mapping[str, Rail] = match_rails(of_nodes).get(wanted, {})

    def of(self, node_id: str, ranks: list[int] | None = None) -> NodeAddress:
        """The current address of a node's SMP; port 0 if the node is not in the plan."""
        card = self.plan.card(node_id)
        if card is None:
            return NodeAddress(node_id, 0, "", 0, ranks or [])
        held = ranks if ranks is not None else _ranks(self.plan, card)
        port = self.plan.smp_ports.get(node_id, 0)
        rails = self._rails(card)
        host = rails[0].host if rails else card.host
        return NodeAddress(node_id, card.incarnation, host, port, held, rails)

    def _rails(self, card: NodeCard) -> list[Rail]:
        if len(card.rails) < 2:
            return []
        first = self._first.get(card.node_id)
        return sorted(card.rails, key=lambda rail: rail != first)


def _sources(
    places: _Places,
    ranks: list[int],
    restored: Version | None,
    smp: AgentSmpClient,
    previous_world_size: int,
) -> list[PreviousGroup]:
    """Previous groups of those local ranks whose restored version is not in this node's memory."""
    plan = places.plan
    if restored is None:
        return []
    if restored.generation < 0:
        return _loaders(places, previous_world_size)
    missing = {rank for rank in ranks if not smp.memory.holds(Rank(rank), restored)}
    if plan.is_resized:
        missing = set(range(plan.restore_world_size))  # any rank may need parts of any other
    return [
        group
        for group in _previous_groups(places)
        if missing & {rank for node in group.nodes for rank in node.ranks}
    ]


def _loaders(places: _Places, previous_world_size: int) -> list[PreviousGroup]:
    """Nodes that each loaded a part of a checkpoint of another world size."""
    plan = places.plan
    count = len(plan.members)
    if not previous_world_size or count < 2:
        return []
    return [
        PreviousGroup(
            [
                places.of(node.node_id, list(ranks_at(at, count, previous_world_size)))
                for at, node in enumerate(plan.members)
            ],
            0,
            -1,
        )
    ]


def _readable(places: _Places, ranks: list[int], restored: Version | None) -> list[PreviousGroup]:
    """Groups of nodes from which any rank's shard of the restored version can be read.

    The nodes of this generation come first: each fetches, or has loaded, the shards of its own
    ranks. The others may free their copies once the version is committed again.
    """
    plan = places.plan
    if restored is None or not ranks or plan.is_resized or len(plan.members) < 2:
        return []
    members = PreviousGroup([places.of(node.node_id) for node in plan.members], 0, -1)
    return [members, *(_previous_groups(places) if restored.generation >= 0 else [])]


def _previous_groups(places: _Places) -> list[PreviousGroup]:
    return [
        PreviousGroup(
            nodes=[
                places.of(one, held)
                for one, held in zip(source.node_ids, source.ranks, strict=True)
            ],
            parity=source.parity,
            generation=source.generation,
            is_ring=source.is_ring,
        )
        for source in places.plan.sources
    ]


def _ranks(plan: GenerationPlan, card: NodeCard) -> list[int]:
    node = plan.member(card.node_id)
    return list(node.ranks) if node is not None else []
