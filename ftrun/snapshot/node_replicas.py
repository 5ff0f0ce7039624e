"""Whether the ranks of one node still hold the same where they did so before.

Runs in:  the SMP of a run without a group; with one the group compares (`redundancy.py`). Pure.
Takes in: manifests of this node, version after version.
Gives:    the ranks whose replicas are not what most others have.

Rule 1: only what was equal once is compared: ranks that train something each for itself begin
        unequal, or become so in their first step.
Rule 2: what has differed is not looked at again, so each difference is told once.
"""

from collections import Counter, defaultdict

from ftrun.snapshot.manifest import NodeManifest


class NodeReplicas:
    """Over one generation."""

    def __init__(self) -> None:
        self._holders: dict[int, frozenset[int]] = {}
        """By section, the ranks that held the same; sections that differ have none."""
        self._shape: tuple[object, ...] = ()

    def look(self, manifest: NodeManifest) -> set[int]:
        """Ranks that hold something else than most; all, where no content has most.

        Args:
            manifest: of a version that every rank here has sealed.
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
    """The digest of each section that may be a replica, by rank."""
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
