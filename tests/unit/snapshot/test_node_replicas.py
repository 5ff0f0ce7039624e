"""Ranks of one node that held the same, and do no more."""

from collections.abc import Mapping

from ftrun.snapshot.manifest import NodeManifest, RankManifest, Section
from ftrun.snapshot.node_replicas import NodeReplicas


def node(content: Mapping[int, Mapping[int, int]], *, header: int = 7) -> NodeManifest:
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
    return node({r: {1: others.get(f"r{r}", step), 2: step + 50, 9: 100 + r} for r in range(3)})


def test_the_one_that_differs_from_most_is_found_once() -> None:
    made = NodeReplicas()
    assert made.look(equal(1)) == set()
    assert made.look(equal(2)) == set()
    assert made.look(equal(3, r1=99)) == {1}
    assert made.look(equal(4, r1=98)) == set(), "it was told"


def test_where_nobody_has_most_all_are_told() -> None:
    made = NodeReplicas()
    made.look(equal(1))
    assert made.look(equal(2, r0=97, r1=98, r2=99)) == {0, 1, 2}


def test_what_never_was_equal_is_nobodys_fault() -> None:
    made = NodeReplicas()
    made.look(equal(1, r1=99))
    assert made.look(equal(2, r1=98)) == set()


def test_sections_of_which_each_rank_has_its_own_part_are_not_compared() -> None:
    made = NodeReplicas()
    for step in (1, 2):
        assert made.look(node({0: {10: step}, 1: {11: step + 1}})) == set()


def test_another_layout_begins_anew() -> None:
    made = NodeReplicas()
    made.look(equal(1))
    changed = node({r: {1: r, 2: r} for r in range(3)}, header=8)
    assert made.look(changed) == set()
    assert made.look(changed) == set()
