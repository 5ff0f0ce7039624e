"""Maps the blocks of the nodes of a group to stripes, and stripes to the nodes with parity.

    n = 4, m = 1    node 0   node 1   node 2   node 3
    stripe 0        parity   data 0   data 1   data 2
    stripe 1        data 2   parity   data 0   data 1
    stripe 2        data 1   data 2   parity   data 0
    stripe 3        data 0   data 1   data 2   parity     and so on, from the top

A stripe has one block of each of its k = n - m data nodes, and one block of parity on each of the m
others. A lost node therefore costs every stripe one block. The roles move by one node from stripe
to stripe, so all nodes send, receive, compute and store equal amounts. Parity takes m/k of the
memory of the data. With n = 2 and m = 1 a stripe is a block and its copy.

A node's state is cut into blocks of `block_bytes`; the last one may be shorter. Nodes may have
different amounts of state. A block that a node does not have counts as zeros and is not sent.
"""

from collections.abc import Sequence

from ftrun.errors import InternalError

BLOCK_BYTES = 1 << 20
"""The cost per byte is flat from 1 to 4 MiB, and two such blocks stay in the cache (2026-11)."""


class Stripes:
    """The layout of one group. Nodes are numbered 0 to n-1 in the group's order.

    Methods about a stripe take the stripe first, methods about a node take the node first. Each
    stripe has parity on m nodes; 1 <= m < n.
    """

    def __init__(self, n: int, m: int, block_bytes: int = BLOCK_BYTES) -> None:
        if not (1 <= m < n and block_bytes > 0):
            raise InternalError(
                f"a group of {n} nodes cannot store {m} parity blocks of {block_bytes} bytes "
                "for each stripe; 1 or more of each, and a node with data, are needed"
            )
        self.n, self.m, self.k = n, m, n - m
        self.block_bytes = block_bytes
        rows = range(n)
        # One turn of n stripes has every role of every node, so other stripes need only a division.
        self._parity_turns = [[t for t in rows if (node - t) % n < m] for node in rows]
        self._data_turns = [[t for t in rows if (node - t) % n >= m] for node in rows]

    # --- one stripe -----------------------------------------------------------------------------

    def parity_nodes(self, stripe: int) -> tuple[int, ...]:
        """The m nodes with parity, in order of parity row. If m > 1, the first one gathers."""
        return tuple((stripe + row) % self.n for row in range(self.m))

    def data_nodes(self, stripe: int) -> tuple[int, ...]:
        return tuple((stripe + self.m + position) % self.n for position in range(self.k))

    def index(self, stripe: int, node: int) -> int:
        """A node's place in a stripe: 0 to k-1 with data, k to n-1 with parity."""
        row = (node - stripe) % self.n
        return row - self.m if row >= self.m else self.k + row

    def node_at(self, stripe: int, index: int) -> int:
        return (stripe + (index + self.m) % self.n) % self.n

    def senders(self, stripe: int, num_bytes: Sequence[int]) -> tuple[int, ...]:
        """The data nodes that have a block for a stripe, in order of position.

        `num_bytes` is the size of each node's state, [n].
        """
        return tuple(
            node
            for node in self.data_nodes(stripe)
            if (self.block_of(node, stripe) or 0) < self.num_blocks(num_bytes[node])
        )

    # --- a node's data --------------------------------------------------------------------------

    def stripe_of(self, node: int, block: int) -> int:
        turn, at = divmod(block, self.k)
        return turn * self.n + self._data_turns[node][at]

    def block_of(self, node: int, stripe: int) -> int | None:
        """Index of the node's block in a stripe; None if it has parity there."""
        return _dense(stripe, self.n, self._data_turns[node])

    def num_blocks(self, num_bytes: int) -> int:
        return -(-num_bytes // self.block_bytes)

    def span(self, block: int, num_bytes: int) -> tuple[int, int]:
        """Offset and length of a block of a state of this size; length 0 if it does not exist."""
        start = block * self.block_bytes
        return start, max(0, min(self.block_bytes, num_bytes - start))

    def num_stripes(self, longest_num_bytes: int) -> int:
        """Number of used stripes if no node has more state than this."""
        turns, rest = divmod(self.num_blocks(longest_num_bytes), self.k)
        # The node that begins with m stripes of parity is the last to place `rest` blocks.
        return turns * self.n + (rest + self.m if rest else 0)

    # --- a node's parity ------------------------------------------------------------------------

    def parity_block(self, node: int, stripe: int) -> int | None:
        """Index in the node's parity memory of the block of a stripe; None if it has data there."""
        return _dense(stripe, self.n, self._parity_turns[node])

    def parity_stripe(self, node: int, parity_block: int) -> int:
        turn, at = divmod(parity_block, self.m)
        return turn * self.n + self._parity_turns[node][at]

    def num_parity_blocks(self, node: int, num_stripes: int) -> int:
        turns, rest = divmod(num_stripes, self.n)
        return turns * self.m + sum(t < rest for t in self._parity_turns[node])

    def num_rows(self, node: int, num_bytes: Sequence[int]) -> int:
        """Parity blocks that the node stores; `num_bytes` as in `senders`."""
        return self.num_parity_blocks(node, self.num_stripes(max(num_bytes)))


class RingStripes(Stripes):
    """Each block is a stripe: one node has it, and the next node of the ring has a copy.

        n = 4, m = 1    node 0   node 1   node 2   node 3
        stripe 0        data     copy
        stripe 1                 data     copy
        stripe 2                          data     copy
        stripe 3        copy                       data      and so on, from the top

    A copy is the parity of one data block. The state survives the loss of nodes of which no two are
    neighbours in the ring.
    """

    def __init__(self, n: int, block_bytes: int = BLOCK_BYTES) -> None:
        super().__init__(n, 1, block_bytes)
        self.k = 1
        self._data_turns = [[node] for node in range(n)]
        self._parity_turns = [[(node - 1) % n] for node in range(n)]

    def parity_nodes(self, stripe: int) -> tuple[int, ...]:
        return ((stripe + 1) % self.n,)

    def data_nodes(self, stripe: int) -> tuple[int, ...]:
        return (stripe % self.n,)

    def index(self, stripe: int, node: int) -> int:
        return (node - stripe) % self.n

    def node_at(self, stripe: int, index: int) -> int:
        return (stripe + index) % self.n

    def num_rows(self, node: int, num_bytes: Sequence[int]) -> int:
        return self.num_blocks(num_bytes[node - 1])


def _dense(stripe: int, n: int, own: list[int]) -> int | None:
    """Index of a stripe among a node's `own` stripes, over all turns; None if not among them."""
    turn, at = divmod(stripe, n)
    return turn * len(own) + own.index(at) if at in own else None
