"""Start data that the stub passes to an agent: a new program, or a fork of the reserve.

Runs in:  stub (writes), reserve and agent (read). The agent writes `ZygoteSettings`, and the zygote
          reads them. Standard library only.
"""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

INCARNATION = "FTRUN_AGENT_INCARNATION"
STUB_PID = "FTRUN_STUB_PID"

AGENT_LOST_S = "FTRUN_AGENT_LOST_S"  # monotonic time of the last agent's end; 0: there was none
STUB_SOCKET = "FTRUN_STUB_SOCKET"  # socket on which the stub receives what it must retain
RETAINED_FDS = "FTRUN_RETAINED_FDS"  # of the last agent's memory, with commas; its state is first
RESERVE_SOCKET = "FTRUN_RESERVE_SOCKET"  # orders to a reserve, in an agent that must leave one
STUCK_PIDS = "FTRUN_STUCK_PIDS"  # earlier ranks that have not ended after SIGKILL, with commas
MAX_FDS = 253  # descriptors in one message: the kernel's SCM_MAX_FD
MAX_ORDER_BYTES = 1 << 16


def encode_order(folder: str, variables: dict[str, str]) -> bytes:
    """Encode an order to start one agent.

    Its descriptors are, in order: the socket for the reply, `STUB_SOCKET`, `RETAINED_FDS`.
    `variables` are those that differ from the variables of the first agent.
    """
    return "\0".join([folder, *(f"{name}={value}" for name, value in variables.items())]).encode()


def decode_order(order: bytes) -> tuple[str, dict[str, str]]:
    folder, *words = order.decode().split("\0")
    return folder, {name: value for name, _, value in (word.partition("=") for word in words)}


def encode_numbers(numbers: list[int]) -> str:
    return ",".join(map(str, numbers))


def decode_numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",") if word]


class ZygoteSettings(NamedTuple):
    """What a zygote does before it forks ranks."""

    folder: str  # searched first for modules, as by the script
    preload: list[str]  # modules
    prepare: list[str]  # functions, as MODULE:FUNCTION
    argv: list[str]  # the script and its arguments, as the functions see them in sys.argv

    @staticmethod
    def of(folder: str, start: Mapping[str, Any], torchrun_argv: list[str]) -> "ZygoteSettings":
        """`start`: the section of the profile."""
        at = torchrun_argv.index("--") + 1 if "--" in torchrun_argv else len(torchrun_argv)
        return ZygoteSettings(folder, start["preload"], start["prepare"], torchrun_argv[at:])

    def encode(self) -> str:
        return json.dumps(self)

    @staticmethod
    def decode(text: str) -> "ZygoteSettings":
        return ZygoteSettings(*json.loads(text))
