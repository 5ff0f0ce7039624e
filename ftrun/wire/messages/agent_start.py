"""What the stub says to an agent that it starts, as a program or as a fork of the reserve.

Runs in:  stub (writes), reserve and agent (read). Standard library only.
"""

INCARNATION = "FTRUN_AGENT_INCARNATION"
STUB_PID = "FTRUN_STUB_PID"

AGENT_LOST_S = "FTRUN_AGENT_LOST_S"
"""When the agent before this one ended, on the monotonic clock; 0: this is the first."""

STUB_SOCKET = "FTRUN_STUB_SOCKET"
"""Descriptor of the socket on which the stub takes what it is to keep."""

KEPT_FDS = "FTRUN_KEPT_FDS"
"""Descriptors that the last agent gave the stub, comma-separated; the first has its state."""

RESERVE_SOCKET = "FTRUN_RESERVE_SOCKET"
"""Descriptor on which a reserve takes orders; only in an agent that is to leave one."""

STUCK_PIDS = "FTRUN_STUCK_PIDS"
"""Processes of earlier ranks that have not ended after SIGKILL, comma-separated."""

MAX_FDS = 253
"""In one message: the kernel's SCM_MAX_FD."""

MAX_ORDER_BYTES = 1 << 16


def encode_order(folder: str, variables: dict[str, str]) -> bytes:
    """An order for one agent. Its descriptors: where it answers, `STUB_SOCKET`, `KEPT_FDS`.

    Args:
        folder: of the run.
        variables: those that differ from the variables that the first agent was started with.
    """
    return "\0".join([folder, *(f"{name}={value}" for name, value in variables.items())]).encode()


def decode_order(order: bytes) -> tuple[str, dict[str, str]]:
    """The run folder and the variables."""
    folder, *words = order.decode().split("\0")
    return folder, {name: value for name, _, value in (word.partition("=") for word in words)}


def encode_numbers(numbers: list[int]) -> str:
    return ",".join(map(str, numbers))


def decode_numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",") if word]
