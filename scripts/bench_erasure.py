#!/usr/bin/env python3
"""Measure protection across nodes on a link of 1 Gbit/s, and the time to restore a lost node.

    python scripts/bench_erasure.py --json erasure.json

Real SMPs run on the nodes of a virtual cluster. Each has its own state and a cable that is limited
in both directions. This process acts as their agents and workers, without torch.

encode      from the seals until each node's version is protected, compared with the time that the
            cable allows: its rate, measured in the same run, / (1 + (m - 1) / k)
restore     a node is lost; from the new generation until its successor has the state, compared
            with the cable's rate
parity      memory on a node for others' parity, compared with 2 m / k of its own state
cpu         cables without a limit: processor seconds of all SMPs per GB of state, compared with a
            plain socket's for the bytes that must cross, 1 + (m - 1) / k, and the encoding alone
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import bench_common as bench
import numpy as np
import xxhash
from bench_codec import codec_figures
from nodes_run import environment
from virtual_cluster import VirtualCluster

from ftrun.erasure.stripes import BLOCK_BYTES
from ftrun.ids import Version, version
from ftrun.snapshot.layout import CopyTiming, Layout, LayoutEntry, make_layout
from ftrun.wire.messages import envelope as messages
from ftrun.wire.messages import smp as smp_messages
from ftrun.wire.messages import worker as worker_messages
from ftrun.wire.shared_memory.arena import Arena, SlotHeader, SlotState, table_digest
from ftrun.wire.shared_memory.pages import create_command_page
from ftrun.wire.transport.channel import Channel, ReceivedMessage, connect

RUN_ID = "bench-erasure"
SHAPES = ((3, 1), (4, 2))
LINK = "1gbit"
WAIT_S = 60.0
LINK_BYTES = 100_000_000
CODEC_BYTES = 64 << 20
PORT = 5201

RECEIVER = f"""
import socket, time
with socket.create_server(("", {PORT})) as server:
    print("ready", flush=True)
    connection, _ = server.accept()
    buffer, total = bytearray(1 << 20), len(connection.recv(1 << 20))
    began_s, cpu_s = time.monotonic(), time.process_time()
    while count := connection.recv_into(buffer):
        total += count
    print(total / (time.monotonic() - began_s), time.process_time() - cpu_s)
"""
SENDER = f"""
import socket, sys, time
data = bytes({LINK_BYTES})
with socket.create_connection((sys.argv[1], {PORT})) as connection:
    cpu_s = time.process_time()
    connection.sendall(data)
    print(time.process_time() - cpu_s)
"""


@dataclass
class SmpNode:
    """An SMP on a node of the cluster, with the agent and the one worker that talk to it."""

    cluster: VirtualCluster
    rank: int
    layout: Layout
    folder: Path
    deadline: bench.Deadline
    starts: int = 0
    port: int = 0
    page_fd: int = -1
    arena_fd: int = -1
    parity_regions: dict[int, int] = field(default_factory=dict)
    reported: list[messages.AnyMessage] = field(default_factory=list)

    @property
    def position(self) -> smp_messages.NodeAddress:
        host = self.cluster.address(self.rank)
        return smp_messages.NodeAddress(f"node{self.rank}", 1, host, self.port, [self.rank])

    def start(self) -> None:
        self.starts += 1
        path = self.folder / f"{self.rank}-{self.starts}.sock"
        words = ["--run-id", RUN_ID, "--socket", str(path), "--orphan-s", "600"]
        with path.with_suffix(".log").open("wb") as log:
            self.process = self.cluster.run(
                self.rank,
                [sys.executable, "-m", "ftrun.smp", *words],
                env=environment(),
                stderr=log,
            )
        self.wait_for("its socket", path.exists)
        self.agent = self.connect("agent")
        host = self.cluster.address(self.rank)
        answer = self.ask(smp_messages.ListenForPeers(host))
        if not isinstance(answer, smp_messages.ListeningForPeers):
            raise bench.BenchError(f"the SMP of node{self.rank} does not listen: {answer}")
        self.port = answer.port

    def connect(self, role: str) -> Channel:
        return connect(
            self.folder / f"{self.rank}-{self.starts}.sock",
            run_id=RUN_ID,
            peer=f"the SMP of node{self.rank}",
            hello=messages.Hello(
                role=role, pid=os.getpid(), rank=self.rank if role == "worker" else -1
            ),
            deadline_s=WAIT_S,
        )

    def ask(self, body: messages.AnyMessage, *fds: int) -> messages.AnyMessage:
        """The answer; events that arrive before it are kept."""
        self.agent.send(body, fds=fds, deadline_s=WAIT_S)
        while self._keep(received := self.agent.receive(deadline_s=WAIT_S)):
            pass
        return received.body

    def has_reported(self, kind: type[messages.AnyMessage], at: Version) -> bool:
        for received in self.agent.receive_ready():
            self._keep(received)
        wanted = (at.generation, at.step)
        return any(
            isinstance(one, kind) and (one.generation, one.step) == wanted for one in self.reported
        )

    def begin(self, generation: int, body: smp_messages.BeginGeneration) -> None:
        if self.page_fd >= 0:
            os.close(self.page_fd)
        self.page_fd = create_command_page()
        self.agent.generation = generation
        answer = self.ask(body, self.page_fd)
        if not isinstance(answer, messages.Done):
            raise bench.BenchError(
                f"node{self.rank} does not begin generation {generation}: {answer}"
            )

    def employ(self, generation: int, world_size: int) -> None:
        self.worker = self.connect("worker")
        self.worker.generation = generation
        layout = self.layout
        body = worker_messages.RequestArena(
            self.rank, world_size, layout.image_bytes, len(layout.pieces), self.layout_id
        )
        answer = self.worker.ask(body, deadline_s=WAIT_S)
        if not isinstance(answer.body, worker_messages.ArenaGranted):
            raise bench.BenchError(f"no arena for rank {self.rank}: {answer.body}")
        (self.arena_fd,) = answer.fds

    @property
    def layout_id(self) -> int:
        return xxhash.xxh3_64_intdigest(self.layout.header)

    def capture(self, at: Version, data: "np.ndarray[Any, Any]") -> None:
        """Fill a slot with these bytes, different for each node and version, and seal it."""
        arena, slot = Arena(self.arena_fd, writable=True), at.step % 2
        try:
            arena.write_header(slot, SlotHeader(SlotState.COPYING, at.generation, at.step, 0, 0, 0))
            start = len(self.layout.header)
            image = np.frombuffer(arena.image(slot), np.uint8)
            image[:start] = np.frombuffer(self.layout.header, np.uint8)
            np.copyto(image[start:], np.roll(data, at.step * 100 + self.rank)[: image.size - start])
            table = arena.table(slot)
            for index, piece in enumerate(self.layout.pieces):
                begin = start + piece.offset
                table[index] = xxhash.xxh3_64_intdigest(image[begin : begin + piece.num_bytes])
            digest, num_bytes = table_digest(table), image.size
            del image, table
            arena.write_header(
                slot,
                SlotHeader(
                    SlotState.SEALED, at.generation, at.step, num_bytes, digest, time.monotonic_ns()
                ),
            )
        finally:
            arena.close()

    def report_sealed(self, at: Version) -> None:
        self.worker.send(
            worker_messages.ShardSealed(self.rank, at.generation, at.step, self.layout_id)
        )

    def lose(self) -> None:
        """Kill its SMP; no process keeps its memory."""
        self.process.kill()
        self.process.wait(WAIT_S)
        self.worker.close()
        self.agent.close()
        for fd in (self.page_fd, self.arena_fd, *self.parity_regions.values()):
            if fd >= 0:
                os.close(fd)
        self.parity_regions, self.reported, self.arena_fd, self.page_fd = {}, [], -1, -1

    def wait_for(self, what: str, is_so: Callable[[], object]) -> None:
        while not is_so():
            if self.process.poll() is not None:
                log = (self.folder / f"{self.rank}-{self.starts}.log").read_text()[-1000:]
                raise bench.BenchError(f"the SMP of node{self.rank} has ended, no {what}:\n{log}")
            self.deadline.check(f"{what} of node{self.rank}")
            time.sleep(0.002)

    def _keep(self, received: ReceivedMessage) -> bool:
        body = received.body
        match body:
            case worker_messages.ArenaGranted():
                for fd in received.fds:
                    os.close(fd)
            case smp_messages.ParityRegionCreated():
                if body.slot in self.parity_regions:
                    os.close(self.parity_regions[body.slot])
                (self.parity_regions[body.slot],) = received.fds
            case (
                smp_messages.VersionReady()
                | smp_messages.VersionCommitted()
                | smp_messages.AbandonVersion()
                | smp_messages.RestoreReady()
                | smp_messages.RestoreFailed()
                | smp_messages.MemoryNeeded()
                | smp_messages.SmpNotice()
            ):
                self.reported.append(body)
            case _:
                return False
        return True


class Group:
    """One protection group."""

    def __init__(self, nodes: list[SmpNode], parity: int, num_bytes: int) -> None:
        self.nodes, self.parity, self.generation = nodes, parity, -1
        self._data = np.random.default_rng(1).integers(0, 256, num_bytes + (1 << 20), np.uint8)

    def begin(self, restored: Version | None = None, lost: SmpNode | None = None) -> None:
        self.generation += 1
        places = [node.position for node in self.nodes]
        old = [
            position if lost is None or position.ranks != [lost.rank] else gone(position)
            for position in places
        ]
        for node in self.nodes:
            body = smp_messages.BeginGeneration(
                generation=self.generation,
                world_size=len(self.nodes),
                local_ranks=[node.rank],
                group=places,
                node_id=f"node{node.rank}",
                parity=self.parity,
                restored=(restored.generation, restored.step) if restored else None,
                protected_in=self.generation - 1 if restored else -1,
                restore_from=[smp_messages.PreviousGroup(old, self.parity, self.generation - 1)]
                if node is lost
                else [],
            )
            node.begin(self.generation, body)

    def protect(self, step: int) -> float:
        """Seconds from the seals until all nodes report that the version is protected."""
        at = version(self.generation, step)
        for node in self.nodes:
            node.capture(at, self._data)
        started_s = time.monotonic()
        for node in self.nodes:
            node.report_sealed(at)
        for node in self.nodes:
            node.wait_for(
                f"{at}", lambda node=node: node.has_reported(smp_messages.VersionReady, at)
            )
        took_s = time.monotonic() - started_s
        for node in self.nodes:
            node.agent.send(smp_messages.CommitVersion(at.generation, at.step))
        for node in self.nodes:
            node.wait_for(
                f"commit of {at}",
                lambda node=node: node.has_reported(smp_messages.VersionCommitted, at),
            )
        return took_s

    def restore(self, lost: SmpNode, at: Version) -> float:
        """Lose a node; seconds until its successor has the state of this version."""
        lost.lose()
        lost.start()
        for node in self.nodes:
            node.ask(smp_messages.VoidAfter(at.generation, at.step))
        started_s = time.monotonic()
        self.begin(at, lost)
        lost.wait_for(
            "the restored state", lambda: lost.has_reported(smp_messages.RestoreReady, at)
        )
        return time.monotonic() - started_s


def gone(position: smp_messages.NodeAddress) -> smp_messages.NodeAddress:
    return smp_messages.NodeAddress(
        position.node_id, position.incarnation, position.host, 0, position.ranks
    )


def main() -> int:
    args = parse_arguments()
    rows = [measure(k, m, args) for k, m in args.shape or SHAPES]
    report(rows, args)
    return 0


def measure(k: int, m: int, args: argparse.Namespace) -> dict[str, Any]:
    num_bytes = int(args.mb * 1e6)
    entries = [LayoutEntry("own", "F32", (num_bytes // 4,), CopyTiming.LAZY)]
    layout = make_layout(entries, plain_bytes=100, metadata={})
    with bench.scratch(base=None) as folder, VirtualCluster(k + m) as cluster:
        for at in range(k + m):
            cluster.slow(at, LINK)
        link, _ = link_rate(cluster)
        nodes = [SmpNode(cluster, rank, layout, folder, args.deadline) for rank in range(k + m)]
        group = started(nodes, m, num_bytes)
        encoded_s = [group.protect(step) for step in range(1, args.rounds + 2)][1:]
        parity_bytes = sum(os.fstat(fd).st_size for fd in nodes[0].parity_regions.values())
        restored_s = group.restore(nodes[0], version(0, args.rounds + 1))
        for node in nodes:
            cluster.slow(node.rank, "off")
            node.lose()
        cpu = cpu_figures(cluster, nodes, m, num_bytes, args.rounds)
    encode_s = statistics.median(encoded_s)
    return {
        "data": k,
        "parity": m,
        "link_mb_per_s": link / 1e6,
        "encode_s": encode_s,
        "encode_over_limit": num_bytes * (1 + (m - 1) / k) / encode_s / link,
        "restore_s": restored_s,
        "restore_over_link": num_bytes / restored_s / link,
        "parity_over_ideal": parity_bytes / (2 * m / k * num_bytes),
        "encode_all_s": encoded_s,
        **cpu,
    }


def started(nodes: list[SmpNode], m: int, num_bytes: int) -> Group:
    for node in nodes:
        node.start()
    group = Group(nodes, m, num_bytes)
    group.begin()
    for node in nodes:
        node.employ(0, len(nodes))
    return group


def cpu_figures(
    cluster: VirtualCluster, nodes: list[SmpNode], m: int, num_bytes: int, rounds: int
) -> dict[str, float]:
    """Processor seconds per GB of state, without a limit on the cables."""
    k = len(nodes) - m
    _, socket_s = link_rate(cluster)
    group = started(nodes, m, num_bytes)
    group.protect(1)  # the first one allocates the memory
    before_s = sum(map(cpu_s, nodes))
    took_s = [group.protect(step) for step in range(2, rounds + 2)]
    all_s = sum(map(cpu_s, nodes)) - before_s
    for node in nodes:
        node.lose()
    per_gb = all_s / (rounds * len(nodes) * num_bytes / 1e9)
    socket_per_gb = socket_s / (LINK_BYTES / 1e9) * (1 + (m - 1) / k)
    shapes = [(k, m)]
    (codec,) = codec_figures(
        shapes, num_bytes=CODEC_BYTES, block_bytes=BLOCK_BYTES, rounds=5, deadline=nodes[0].deadline
    )
    encode_per_gb = 1 / codec["gb_per_cpu_s"]["update"]
    return {
        "cpu_s_per_gb": per_gb,
        "socket_cpu_s_per_gb": socket_per_gb,
        "codec_cpu_s_per_gb": encode_per_gb,
        "cpu_over_ideal": per_gb / (socket_per_gb + encode_per_gb),
        "unlimited_s": statistics.median(took_s),
    }


def cpu_s(node: SmpNode) -> float:
    words = Path(f"/proc/{node.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def link_rate(cluster: VirtualCluster) -> tuple[float, float]:
    """Bytes per second from node 0 to node 1 over one connection; processor seconds of both."""
    receiver = cluster.run(
        1, [sys.executable, "-c", RECEIVER], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL
    )
    assert receiver.stdout is not None
    receiver.stdout.readline()
    sender = cluster.run(
        0, [sys.executable, "-c", SENDER, cluster.address(1)], stdout=subprocess.PIPE
    )
    received, _ = receiver.communicate(timeout=WAIT_S)
    sent, _ = sender.communicate(timeout=WAIT_S)
    rate, receiver_s = map(float, received.split())
    return rate, receiver_s + float(sent)


def report(rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    names = ["link_mb_per_s", "encode_s", "encode_over_limit", "restore_s", "restore_over_link"]
    names += ["parity_over_ideal", "unlimited_s", "cpu_s_per_gb", "socket_cpu_s_per_gb"]
    names += ["codec_cpu_s_per_gb", "cpu_over_ideal"]
    bench.show_table(
        f"{args.mb:g} MB of its own on each node, every cable limited to {LINK}",
        ["", *(f"{row['data']}+{row['parity']}" for row in rows)],
        [[name, *(f"{row[name]:.2f}" for row in rows)] for name in names],
    )
    figures = {
        "restore_over_link": min(row["restore_over_link"] for row in rows),
        "encode_over_limit": min(row["encode_over_limit"] for row in rows),
        "parity_over_ideal": max(row["parity_over_ideal"] for row in rows),
        "shapes": rows,
        "mb": args.mb,
    }
    bench.finish(args.json, figures)


def parse_arguments() -> argparse.Namespace:
    parser = bench.Parser(__doc__, timeout_s=300)
    parser.option("--mb", float, 256, "MB of state per node")
    parser.option("--rounds", int, 3, "number of versions")
    parser.add_argument(
        "--shape",
        action="append",
        type=lambda text: tuple(int(part) for part in text.split("+")),
        metavar="K+M",
    )
    return parser.parsed()


if __name__ == "__main__":
    bench.run_bench(main)
