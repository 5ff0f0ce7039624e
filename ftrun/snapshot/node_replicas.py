"""Checks that equal parts of the ranks of one node stay equal, from version to version.

Runs in:  the SMP of a run without a group; in a group the nodes compare (`redundancy.py`). Pure.
Takes in: the manifest of this node for each version.
Gives:    the ranks whose replicas differ from the majority.

Rule 1: only sections that were equal once are compared. Ranks that each train a different model
        begin unequal, or become unequal in their first step.
Rule 2: a section that has differed is not compared again, so each difference is reported once.
"""

from collections import Counter, defaultdict

from ftrun.snapshot.manifest import NodeManifest


class NodeReplicas:
    """The replicas of one generation."""

    def __init__(self) -> None:
        self._holders: dict[int, frozenset[int]] = {}
        """The ranks that held equal content, by section; sections that differed are removed."""
        self._shape: tuple[object, ...] = ()

    def look(self, manifest: NodeManifest) -> set[int]:
        """Ranks whose content differs from the majority; all holders if there is no majority.

        `manifest` is of a version that every rank here has sealed.
        """
        shape = tuple((one.rank, one.header_digest) for one in manifest.ranks)
        content = _content(manifest)
        if shape != self._shape:
            self._shape, self._holders = shape, _equal(content)
            return set()
        found: set[int] = set()
        for key, holders in list(self._holders.items()):
            digests = {rank: content[key][rank] for rank in holders}
            if len(set(digests.values())) > 1:
                found |= _minority(digests)
                del self._holders[key]
        return found


def _content(manifest: NodeManifest) -> dict[int, dict[int, int]]:
    found: dict[int, dict[int, int]] = defaultdict(dict)
    for one in manifest.ranks:
        for index, section in enumerate(one.sections):
            if section.may_repeat:
                found[section.key][one.rank] = one.digest_of(index)
    return found


def _equal(content: dict[int, dict[int, int]]) -> dict[int, frozenset[int]]:
    return {
        key: frozenset(digests)
        for key, digests in content.items()
        if len(digests) > 1 and len(set(digests.values())) == 1
    }


def _minority(digests: dict[int, int]) -> set[int]:
    right, times = Counter(digests.values()).most_common(1)[0]
    has_most = 2 * times > len(digests)
    return {rank for rank, digest in digests.items() if digest != right or not has_most}
