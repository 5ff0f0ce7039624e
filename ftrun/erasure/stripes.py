"""Which block of which node lies in which stripe, and who keeps its parity.

Runs in:  the SMP. Pure arithmetic; every node of a group computes the same.
Takes in: the size of the group, n, and how many of its nodes may be lost, m.
Gives:    a `Stripes`: from blocks to stripes and back, for data and for parity.

    n = 4, m = 1    node 0   node 1   node 2   node 3
    stripe 0        parity   data 0   data 1   data 2
    stripe 1        data 2   parity   data 0   data 1
    stripe 2        data 1   data 2   parity   data 0
    stripe 3        data 0   data 1   data 2   parity     and so on, from the top

A stripe has one block of each of its k = n - m data nodes, and one block of parity on each of
the m others, so a lost node costs every stripe one block. The roles move by one node from stripe
to stripe: all nodes send, receive, compute and keep the same. Parity takes m/k of the memory of
the data. With n = 2 and m = 1 a stripe is a block and its copy.

A node's state is cut into blocks of `block_bytes`, the last one may be shorter. Nodes may have
different amounts: a block that a node has not counts as zeros, and nobody sends it.
"""

from collections.abc import Sequence

from ftrun.errors import InternalError

BLOCK_BYTES = 1 << 20
"""Cost per byte is flat from 1 to 4 MiB, and two of these stay in the cache (2026-11)."""


class Stripes:
    """The layout of one group. Nodes are numbered 0 to n-1 in the group's order.

    What is asked of a stripe takes the stripe first, what is asked of a node the node.

    Args:
        n: nodes of the group.
        m: how many of them keep parity in each stripe; 1 <= m < n.
        block_bytes: length of a whole block.
    """

    def __init__(self, n: int, m: int, block_bytes: int = BLOCK_BYTES) -> None:
        if not (1 <= m < n and block_bytes > 0):
            raise InternalError(
                f"a group of {n} nodes cannot keep {m} blocks of parity of {block_bytes} bytes "
                "for each stripe; at least one of each and one node with data must be"
            )
        self.n, self.m, self.k = n, m, n - m
        self.block_bytes = block_bytes
        rows = range(n)
        # One turn of n stripes has every role of every node; all else is division.
        self._parity_turns = [[t for t in rows if (node - t) % n < m] for node in rows]
        self._data_turns = [[t for t in rows if (node - t) % n >= m] for node in rows]

    # --- one stripe -----------------------------------------------------------------------------

    def parity_nodes(self, stripe: int) -> tuple[int, ...]:
        """The m nodes with parity, in order of parity row. The first gathers where m > 1."""
        return tuple((stripe + row) % self.n for row in range(self.m))

    def data_nodes(self, stripe: int) -> tuple[int, ...]:
        """The k nodes with data, in order of position."""
        return tuple((stripe + self.m + position) % self.n for position in range(self.k))

    def index(self, stripe: int, node: int) -> int:
        """A node's place in a stripe: 0 to k-1 with data, k to n-1 with parity."""
        row = (node - stripe) % self.n
        return row - self.m if row >= self.m else self.k + row

    def node_at(self, stripe: int, index: int) -> int:
        """The node at that place; the reverse of `index`."""
        return (stripe + (index + self.m) % self.n) % self.n

    def position(self, stripe: int, node: int) -> int | None:
        """Which data block of the stripe is the node's; None where it has parity."""
        index = self.index(stripe, node)
        return index if index < self.k else None

    def senders(self, stripe: int, num_bytes: Sequence[int]) -> tuple[int, ...]:
        """The data nodes that have a block for a stripe, in order of position.

        Args:
            stripe: its number.
            num_bytes: [n], how much state each node has.
        """
        return tuple(
            node
            for node in self.data_nodes(stripe)
            if (self.block_of(node, stripe) or 0) < self.num_blocks(num_bytes[node])
        )

    # --- a node's data --------------------------------------------------------------------------

    def stripe_of(self, node: int, block: int) -> int:
        """The stripe of a node's block, counted from 0."""
        turn, at = divmod(block, self.k)
        return turn * self.n + self._data_turns[node][at]

    def block_of(self, node: int, stripe: int) -> int | None:
        """Which of the node's blocks lies in a stripe; None where it has parity there."""
        return _dense(stripe, self.n, self._data_turns[node])

    def num_blocks(self, num_bytes: int) -> int:
        """Blocks of that much state."""
        return -(-num_bytes // self.block_bytes)

    def span(self, block: int, num_bytes: int) -> tuple[int, int]:
        """Where a block of that much state starts, and its length; 0 where there is none."""
        start = block * self.block_bytes
        return start, max(0, min(self.block_bytes, num_bytes - start))

    def num_stripes(self, longest_num_bytes: int) -> int:
        """Stripes in use where no node has more state than this."""
        turns, rest = divmod(self.num_blocks(longest_num_bytes), self.k)
        # The node that begins with m stripes of parity is the last to place `rest` blocks.
        return turns * self.n + (rest + self.m if rest else 0)

    # --- a node's parity ------------------------------------------------------------------------

    def parity_row(self, node: int, stripe: int) -> int | None:
        """Which parity block of the stripe is the node's; None where it has data."""
        index = self.index(stripe, node)
        return index - self.k if index >= self.k else None

    def parity_block(self, node: int, stripe: int) -> int | None:
        """Which block of the node's parity memory is a stripe's; None where it has data."""
        return _dense(stripe, self.n, self._parity_turns[node])

    def parity_stripe(self, node: int, parity_block: int) -> int:
        """The stripe of a block of the node's parity memory; the reverse of `parity_block`."""
        turn, at = divmod(parity_block, self.m)
        return turn * self.n + self._parity_turns[node][at]

    def num_parity_blocks(self, node: int, num_stripes: int) -> int:
        """Length of the node's parity memory, in blocks.

        The same for all nodes after whole turns of n stripes; within one they differ by at
        most m.
        """
        turns, rest = divmod(num_stripes, self.n)
        return turns * self.m + sum(t < rest for t in self._parity_turns[node])


def _dense(stripe: int, n: int, own: list[int]) -> int | None:
    """Which of the stripes that are a node's own this one is, counted over all turns."""
    turn, at = divmod(stripe, n)
    return turn * len(own) + own.index(at) if at in own else None
