"""Launch request: everything that a standby needs to become a worker.

Runs in:  agent (writes), standby (reads).
"""

import msgspec


class LaunchOrder(msgspec.Struct):
    """Request to start one worker. Descriptors accompany it, in the order of `fd_names`.

    A descriptor named stdout or stderr replaces that stream. Any other name is the environment
    variable that passes the descriptor's number to the worker.
    """

    argv: list[str]
    module: bool
    variables: dict[str, str]
    cwd: str
    fd_names: list[str]


def encode_order(order: LaunchOrder) -> bytes:
    return msgspec.msgpack.encode(order)


def decode_order(data: bytes) -> LaunchOrder:
    return msgspec.msgpack.decode(data, type=LaunchOrder)
