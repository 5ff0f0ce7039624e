"""What a standby must know to become a worker.

Runs in: agent (writes), standby (reads).
"""

import msgspec


class LaunchOrder(msgspec.Struct):
    """One worker to be. Descriptors travel beside it, in the order of `fd_names`.

    A descriptor named stdout or stderr takes that stream's place; any other name is the variable
    that tells the worker its number.
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
