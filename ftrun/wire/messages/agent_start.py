"""Start data that the stub passes to an agent: a new program, or a fork of the reserve.

Runs in:  stub (writes), reserve and agent (read). Standard library only.
"""

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
