"""All nodes of a group reach the same result, in whatever order messages arrive.

Ranks of one node whose replicas have diverged are found.
"""

from collections.abc import Mapping

from ftrun.snapshot.manifest import NodeManifest, RankManifest, Section
from ftrun.snapshot.plan_agreement import GroupPlan, NodeReplicas, ReplicaReport

KEYS = (11, 22, 33)


def node(rank: int, *contents: int, header: int = 5) -> NodeManifest:
    sections = [Section(key, at, 1, 1 << 20, True) for at, key in enumerate(KEYS)]
    digests = b"".join(one.to_bytes(8, "little") for one in contents)
    return NodeManifest([RankManifest(rank, 3, 4 << 20, 3, 1, 4096, header, 9, sections, digests)])


def group() -> list[GroupPlan]:
    return [
        GroupPlan(position=position, num_nodes=3, parity=1, small_state_bytes=1 << 10)
        for position in range(3)
    ]


def said(plans: list[GroupPlan], nodes: list[NodeManifest]) -> dict[int, ReplicaReport]:
    return {at: plan.report(one) for at, (plan, one) in enumerate(zip(plans, nodes, strict=True))}


def resolved() -> list[GroupPlan]:
    """A group with a plan."""
    plans = group()
    nodes = dict(enumerate(node(rank, 1, 2, rank) for rank in range(3)))
    for plan in plans:
        plan.resolve(said(plans, list(nodes.values())), nodes)
    return plans


def test_the_first_version_needs_manifests_and_the_next_does_not() -> None:
    plans = group()
    nodes = [node(rank, 1, 2, rank) for rank in range(3)]
    reported = said(plans, nodes)
    assert {plan_id for plan_id, _ in reported.values()} == {0}
    for plan in plans:
        assert plan.resolve({0: reported[0]}, {}).plan is None
        asked = plan.resolve(reported, {0: nodes[0]})
        assert asked.needs_manifests
        assert asked.plan is None
        assert plan.resolve(reported, dict(enumerate(nodes))).plan is not None
    ids = {plan.plan.id for plan in plans if plan.plan is not None}
    assert len(ids) == 1
    later = said(plans, [node(rank, 7, 8, 70 + rank) for rank in range(3)])
    for plan in plans:
        made = plan.resolve(later, {})
        assert not made.needs_manifests
        assert made.plan is plan.plan is not None
        assert made.plan.coded_bytes == [1 << 20] * 3


def test_replicas_that_differ_are_encoded_for_good() -> None:
    plans = resolved()
    drifted = dict(enumerate(node(rank, 3, 4 if rank != 1 else 5, rank) for rank in range(3)))
    reported = said(plans, list(drifted.values()))
    for plan in plans:
        assert plan.resolve(reported, {}).needs_manifests
    found = [plan.resolve(reported, drifted) for plan in plans]
    assert {one.differ for one in found} == {frozenset({(1, 1)})}
    assert len({one.plan.id for one in found if one.plan is not None}) == 1
    # Equal again, but no longer trusted.
    again = dict(enumerate(node(rank, 6, 6, rank, header=8) for rank in range(3)))
    reported = said(plans, list(again.values()))
    for plan in plans:
        made = plan.resolve(reported, again).plan
        assert made is not None
        assert made.coded_bytes == [2 << 20] * 3


def test_a_change_of_one_layout_makes_all_send_their_manifests() -> None:
    plans = resolved()
    changed = [node(0, 1, 2, 0), node(1, 1, 2, 1, header=6), node(2, 1, 2, 2)]
    reported = said(plans, changed)
    assert [plan_id == 0 for plan_id, _ in reported.values()] == [False, True, False]
    for plan in plans:
        made = plan.resolve(reported, dict(enumerate(changed)))
        # A node that had a plan must still send its manifest: the others wait for it.
        assert made.needs_manifests
        assert made.plan is not None
        assert not made.differ


def node_of_node(content: Mapping[int, Mapping[int, int]], *, header: int = 7) -> NodeManifest:
    """Ranks with the digest of each section by its key; key 9 never repeats."""
    return NodeManifest(
        [
            RankManifest(
                rank=rank,
                world_size=len(content),
                image_bytes=1 << 20,
                num_pieces=len(digests),
                layout_id=header,
                header_bytes=64,
                header_digest=header,
                table_digest=0,
                sections=[Section(key, at, 1, 1 << 18, key != 9) for at, key in enumerate(digests)],
                digests=b"".join(one.to_bytes(8, "little") for one in digests.values()),
            )
            for rank, digests in content.items()
        ]
    )


def equal(step: int, **others: int) -> NodeManifest:
    """Three ranks with two sections, equal but for the named ones (r1: rank 1's section 1)."""
    return node_of_node(
        {r: {1: others.get(f"r{r}", step), 2: step + 50, 9: 100 + r} for r in range(3)}
    )


def test_the_one_that_differs_from_most_is_found_once() -> None:
    made = NodeReplicas()
    assert made.poll(equal(1)) == set()
    assert made.poll(equal(2)) == set()
    assert made.poll(equal(3, r1=99)) == {1}
    assert made.poll(equal(4, r1=98)) == set(), "it was reported"


def test_where_no_node_has_most_all_are_reported() -> None:
    made = NodeReplicas()
    made.poll(equal(1))
    assert made.poll(equal(2, r0=97, r1=98, r2=99)) == {0, 1, 2}


def test_what_never_was_equal_is_no_other_rank_s_fault() -> None:
    made = NodeReplicas()
    made.poll(equal(1, r1=99))
    assert made.poll(equal(2, r1=98)) == set()


def test_sections_of_which_each_rank_has_its_own_part_are_not_compared() -> None:
    made = NodeReplicas()
    for step in (1, 2):
        assert made.poll(node_of_node({0: {10: step}, 1: {11: step + 1}})) == set()


def test_another_layout_restarts() -> None:
    made = NodeReplicas()
    made.poll(equal(1))
    changed = node_of_node({r: {1: r, 2: r} for r in range(3)}, header=8)
    assert made.poll(changed) == set()
    assert made.poll(changed) == set()
