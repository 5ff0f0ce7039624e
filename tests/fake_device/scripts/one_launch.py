"""Launches one rank from a zygote whose standby was bound: FOLDER SCENARIO."""

import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from ftrun import clock
from ftrun.agent.launch.process import reap_strangers
from ftrun.agent.launch.zygote_client import ZygoteClient
from ftrun.ids import Generation, Rank
from ftrun.journal import Journal
from ftrun.linux import become_subreaper
from ftrun.wire.messages.agent_start import ZygoteSettings
from ftrun.wire.messages.worker import LaunchRequest
from ftrun.wire.shared_memory.pages import create_command_page, create_page, create_stack_file

RANK = """
import os, torch
bound = torch.get_device_module().is_initialized()
print(f"launched bound={bound} visible={os.environ['CUDA_VISIBLE_DEVICES']}", flush=True)
"""
SMALL = """
from fake_device import fake
fake.set_memory_limit(1 << 20)
"""
WAIT_S = 120.0


def request_of(folder: Path, visible: str, rank: int = 0) -> LaunchRequest:
    descriptors = {
        "heartbeat": create_page("heartbeat"),
        "command": create_command_page(),
        "stack": create_stack_file("0"),
        "stdout": os.dup(1),
        "stderr": os.dup(2),
    }
    names = ("LOCAL_RANK", "RANK")
    variables = {**os.environ, **dict.fromkeys(names, str(rank)), "CUDA_VISIBLE_DEVICES": visible}
    made = LaunchRequest(Generation(0), Rank(0), 1, agent_pid=os.getpid(), smp_socket="nowhere")
    return msgspec.structs.replace(
        made,
        descriptors=descriptors,
        argv=[str(folder / "rank.py")],
        variables=variables,
        cwd=str(folder),
    )


def answering(data: bytes) -> socket.socket:
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    its.send(data)
    return mine


def wait_until(client: ZygoteClient, is_so: Callable[[], bool]) -> None:
    give_up_s = clock.now_s() + WAIT_S
    while not is_so():
        if clock.now_s() > give_up_s:
            raise SystemExit("not within the limit")
        client.collect()
        clock.sleep(0.02)


def run(client: ZygoteClient, request: LaunchRequest) -> None:
    child = client.launch(request, int(request.variables["LOCAL_RANK"]))
    if not child.wait(WAIT_S):
        raise SystemExit("the rank is still there")


def launch_again(client: ZygoteClient, request: LaunchRequest) -> None:
    client.refill()
    wait_until(client, lambda: len(client.children) == 2)
    run(client, request)
    client.refill()
    wait_until(client, lambda: len(client.children) == 2)
    client.bind(1)
    print(f"bound again: {client.holds_device}", flush=True)


def bind_fewer(client: ZygoteClient, request: LaunchRequest, journal: Path) -> None:
    """Two ranks have run here, and one does now."""
    run(client, request)
    client.want(2)
    wait_until(client, lambda: len(client.children) == 3)
    client.bind(1)
    wait_until(client, lambda: "standby_bound" in journal.read_text())
    client.bind(1)
    print("bound:", [one.binding.local_rank for one in client._standbys if one.binding], flush=True)


def main() -> None:
    folder, scenario = Path(sys.argv[1]), sys.argv[2]
    (folder / "rank.py").write_text(RANK)
    become_subreaper()
    (folder / "small.py").write_text(SMALL)
    preload = ["fake_device.preloaded", *(["small"] if scenario == "no room" else [])]
    client = ZygoteClient(ZygoteSettings(str(folder), preload, [], []), Journal(folder))
    client.start()
    client.want(1)
    journal = folder / "journal.jsonl"
    request = request_of(folder, "0,1")
    run(client, request)
    if scenario == "fewer ranks":
        bind_fewer(client, request_of(folder, "0,1", rank=1), journal)
        client.close()
        return
    client.refill()
    wait_until(client, lambda: len(client.children) == 2)
    (standby,) = client.children[1:]
    if scenario == "at once":
        standby.signal(signal.SIGSTOP)
    client.bind(1)
    if scenario == "unreadable":
        client._standbys[0].orders = answering(b"not an answer")
    if scenario == "ended":
        standby.signal(signal.SIGKILL)
    if scenario != "at once":
        wait_until(client, lambda: "standby_" in journal.read_text())
    if scenario == "unbound":
        client.unbind("GPU 0 is lost")
    last = request_of(folder, "1" if scenario == "other variable" else "0,1")
    run(client, last)
    if scenario == "no step":  # `bind` was not called since that launch
        launch_again(client, request)
    client.close()
    reap_strangers([])
    if not standby.reap():
        print("the standby is still there")


if __name__ == "__main__":
    main()
