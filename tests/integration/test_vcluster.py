"""A virtual cluster has nodes of its own, which fail as requested, and leaves nothing behind.

The drills with many nodes depend on it: peers must see a killed or frozen node as they would on a
real network.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from virtual_cluster import ClusterError, VirtualCluster, available, clusters
from virtual_node import Process

if reason := available():
    pytest.skip(f"needs namespaces: {reason}", allow_module_level=True)

SCRIPTS = Path(__file__).parents[2] / "scripts"
COMMAND = str(SCRIPTS / "vcluster")
WAIT_S = 600.0
UPLINK_MBIT = 40
KINDS = ("net", "mnt", "pid", "uts", "ipc")
NO_ANSWER = ("no answer", "EHOSTUNREACH")
"""The second comes from a kernel that has asked for the address for some seconds."""

SERVER = """
import socketserver

class Echo(socketserver.BaseRequestHandler):
    def handle(self):
        while data := self.request.recv(65536):
            self.request.sendall(data)

socketserver.ThreadingTCPServer.daemon_threads = True
with socketserver.ThreadingTCPServer(("", 5000), Echo) as server:
    print("ready", flush=True)
    server.serve_forever()
"""

CLIENT = """
import errno, socket, sys, time

def connect(peer, wait_s):
    global connection
    connection = socket.create_connection((peer, 5000), timeout=float(wait_s))
    return "connected"

def ask(text, wait_s):
    connection.settimeout(float(wait_s))
    connection.sendall(text.encode())
    return receive(wait_s)

def receive(wait_s):
    connection.settimeout(float(wait_s))
    data = connection.recv(65536)
    return data.decode() if data else "end"

def rate(peer, count):
    # Bytes per second there and back, after what a bucket of tokens lets through at once.
    with socket.create_connection((peer, 5000)) as big:
        def both(size):
            big.sendall(bytes(size))
            while size:
                size -= len(big.recv(min(size, 65536)))
        for _ in range(8):
            both(65536)
        began_s = time.monotonic()
        for _ in range(int(count)):
            both(65536)
        return str(int(count) * 65536 / (time.monotonic() - began_s))

def round_trip():
    # The shortest of some, so that it is the network's and not the machine's.
    took_s = []
    for _ in range(5):
        began_s = time.monotonic()
        ask("x", 60)
        took_s.append(time.monotonic() - began_s)
    return str(min(took_s))

for line in sys.stdin:
    name, *words = line.split()
    try:
        print(globals()[name](*words), flush=True)
    except TimeoutError:
        print("no answer", flush=True)
    except OSError as error:
        print(errno.errorcode[error.errno], flush=True)
"""


class Talk:
    """A program in a node that connects, asks and listens, one request at a time."""

    def __init__(self, cluster: VirtualCluster, node: int) -> None:
        self._process = cluster.run(
            node,
            [sys.executable, "-c", CLIENT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(self, *words: object) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(*words, file=self._process.stdin, flush=True)
        return str(self._process.stdout.readline().strip())

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture(scope="module")
def cluster() -> Iterator[VirtualCluster]:
    """Three nodes; a test that has broken one does not repair it, see `whole`."""
    with VirtualCluster(3, shm="64m") as made:
        yield made


@pytest.fixture
def whole(cluster: VirtualCluster) -> VirtualCluster:
    """Three living nodes, without processes, with new cables."""
    for node in cluster.nodes():
        if node.is_alive:
            cluster.kill(node.name)
        cluster.revive(node.name)
    return cluster


@pytest.fixture
def talk(whole: VirtualCluster) -> Iterator[Talk]:
    """From node0, with an echo server on node1."""
    server = serve(whole, 1)
    made = Talk(whole, 0)
    yield made
    made.close()
    server.kill()
    server.communicate()


def serve(cluster: VirtualCluster, node: int) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", SERVER]
    server = cluster.run(node, command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    assert server.stdout.readline() == "ready\n"
    return server


def output_of(cluster: VirtualCluster, node: int | str, *argv: str) -> str:
    process = cluster.run(node, argv, stdout=subprocess.PIPE, text=True)
    output, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0
    return str(output).strip()


def quickest_rate(talk: Talk, peer: str, count: int) -> float:
    """The best of some, so that it is the network's and not the machine's."""
    return max(float(talk("rate", peer, count)) for _ in range(5))


def namespaces(cluster: VirtualCluster) -> set[str]:
    pids = [node.init.pid for node in cluster.nodes() if node.init is not None]
    return {os.readlink(f"/proc/{pid}/ns/{kind}") for pid in pids for kind in KINDS}


def holders_of(names: set[str]) -> set[Process]:
    """All processes of the machine that are in one of these namespaces.

    Other tests create namespaces at the same time, and those get the numbers of ended ones.
    """
    found = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError, ClusterError):  # it has ended
                process = Process.of(int(folder.name))
                if names & {os.readlink(folder / "ns" / kind) for kind in KINDS}:
                    found.add(process)
    return found


def is_there(process: Process) -> bool:
    """Whether it still holds a namespace; an ended process does until it is reaped."""
    with contextlib.suppress(ClusterError):
        return Process.of(process.pid) == process
    return False


def wait_until_gone(pids: Iterable[int]) -> None:
    give_up_s = time.monotonic() + WAIT_S
    while left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < give_up_s, left
        time.sleep(0.01)


# --- the own parts of a node ----------------------------------------------------------------------


def test_each_node_has_its_own_name_address_and_processes(whole: VirtualCluster) -> None:
    for index in range(3):
        assert output_of(whole, index, "hostname") == f"node{index}"
        code = "import socket; print(socket.gethostbyname(socket.gethostname()))"
        assert output_of(whole, index, sys.executable, "-c", code) == whole.address(index)
        code = "import os; print(sum(name.isdecimal() for name in os.listdir('/proc')))"
        assert output_of(whole, index, sys.executable, "-c", code) == "2"
    assert len({whole.address(index) for index in range(3)}) == 3
    assert whole.address("node2") == whole.address(2)


def test_memory_files_of_a_node_are_its_own(whole: VirtualCluster) -> None:
    for folder in ("/dev/shm", "/run", "$XDG_RUNTIME_DIR"):
        output_of(whole, 0, "sh", "-c", f"touch {folder}/mine-{os.getpid()}")
        assert output_of(whole, 0, "sh", "-c", f"ls {folder}").count(f"mine-{os.getpid()}") == 1
        assert f"mine-{os.getpid()}" not in output_of(whole, 1, "sh", "-c", f"ls {folder}")
    assert not Path(f"/dev/shm/mine-{os.getpid()}").exists()
    size_kib = output_of(whole, 0, "df", "--output=size", "/dev/shm").split()[-1]
    assert int(size_kib) == 64 * 1024


def test_files_are_shared_and_the_working_directory_is_kept(
    whole: VirtualCluster, tmp_path: Path
) -> None:
    process = whole.run(0, ["sh", "-c", "pwd > here"], cwd=tmp_path)
    assert process.wait(WAIT_S) == 0
    assert (tmp_path / "here").read_text().strip() == str(tmp_path)


def test_a_command_is_a_child_with_its_own_exit_code_and_signals(whole: VirtualCluster) -> None:
    assert whole.run(0, ["sh", "-c", "exit 7"]).wait(WAIT_S) == 7
    process = whole.run(
        0,
        ["sh", "-c", 'echo "$$ $VALUE"; exec sleep 600'],
        env={"PATH": os.environ["PATH"], "VALUE": "42"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    inside, value = process.stdout.readline().split()
    assert value == "42"
    assert int(inside) != process.pid, "the pid is one of the node"
    process.terminate()
    process.communicate(timeout=WAIT_S)
    assert process.returncode == -signal.SIGTERM


def test_orphans_in_a_node_are_reaped(whole: VirtualCluster) -> None:
    code = """
import os, subprocess
orphan = int(subprocess.check_output(["sh", "-c", "sleep 0.1 >/dev/null & echo $!"]))
while os.path.exists(f"/proc/{orphan}"):
    pass
"""
    output_of(whole, 0, sys.executable, "-c", code)


def test_nodes_talk(talk: Talk, whole: VirtualCluster) -> None:
    assert talk("connect", "node1", 10) == "connected"
    assert talk("ask", "hello", 10) == "hello"
    assert talk("connect", "node2", 10) == "ECONNREFUSED"


# --- failures -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_killed_node_dies_without_a_message(talk: Talk, whole: VirtualCluster) -> None:
    holder = whole.run(1, ["sleep", "600"])
    assert talk("connect", "node1", 10) == "connected"
    assert talk("ask", "hello", 10) == "hello"
    whole.kill("node1")
    assert holder.wait(WAIT_S) == -signal.SIGKILL
    assert talk("receive", 1.5) == "no answer"
    assert talk("ask", "hello", 1.5) == "no answer"
    assert talk("connect", "node1", 2) in NO_ANSWER
    with pytest.raises(ClusterError, match="node1 is dead"):
        whole.run(1, ["true"])
    assert [node.state for node in whole.nodes()] == ["up", "dead", "up"]


def test_a_revived_node_is_empty_and_can_be_reached(talk: Talk, whole: VirtualCluster) -> None:
    output_of(whole, 1, "sh", "-c", "echo kept >/dev/shm/lost")
    assert talk("connect", "node1", 10) == "connected"
    before = whole.address(1)
    with pytest.raises(ClusterError, match="alive"):
        whole.revive(1)
    whole.kill(1)
    whole.revive(1)
    assert whole.address(1) == before
    assert output_of(whole, 1, "ls", "/dev/shm") == ""
    assert output_of(whole, 1, "hostname") == "node1"
    # Its kernel does not know the connection, and resets it.
    assert talk("ask", "hello", WAIT_S) == "ECONNRESET"
    assert talk("connect", "node1", 10) == "ECONNREFUSED"
    server = serve(whole, 1)
    assert talk("connect", "node1", 10) == "connected"
    server.kill()
    server.communicate()


def test_a_reset_node_reports_its_peers(talk: Talk, whole: VirtualCluster) -> None:
    output_of(whole, 1, "sh", "-c", "echo kept >/dev/shm/kept")
    assert talk("connect", "node1", 10) == "connected"
    assert talk("ask", "hello", 10) == "hello"
    whole.reset(1)
    assert talk("receive", WAIT_S) in ("end", "ECONNRESET")
    assert talk("connect", "node1", 10) == "ECONNREFUSED"
    assert output_of(whole, 1, "cat", "/dev/shm/kept") == "kept"


@pytest.mark.slow
def test_a_connection_outlives_a_cut(talk: Talk, whole: VirtualCluster) -> None:
    assert talk("connect", "node1", 10) == "connected"
    assert talk("ask", "before", 10) == "before"
    whole.cut(1)
    assert talk("ask", "meanwhile", 1) == "no answer"
    assert output_of(whole, 1, "hostname") == "node1"
    whole.heal(1)
    assert talk("receive", WAIT_S) == "meanwhile"
    assert talk("ask", "after", 10) == "after"


@pytest.mark.slow
def test_a_pair_is_cut_and_others_receive_from_both(talk: Talk, whole: VirtualCluster) -> None:
    third = Talk(whole, 2)
    assert talk("connect", "node1", 10) == "connected"
    assert talk("ask", "before", 10) == "before"
    whole.cut(0, peer=1)
    assert whole.nodes()[1].state == "up, cut from node0"
    assert talk("ask", "meanwhile", 1) == "no answer"
    assert third("connect", "node1", 10) == "connected"
    assert third("ask", "hello", 10) == "hello"
    assert third("connect", "node0", 10) == "ECONNREFUSED"
    whole.heal(1)
    assert talk("receive", WAIT_S) == "meanwhile"
    third.close()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["cgroup", "signals"])
def test_the_kernel_of_a_frozen_node_answers_and_no_other(
    talk: Talk, whole: VirtualCluster, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "signals":
        monkeypatch.setattr("virtual_node._cgroup_of", lambda pid: Path("/proc/nowhere"))
    assert talk("connect", "node1", 10) == "connected"
    assert talk("ask", "before", 10) == "before"
    whole.freeze(1)
    assert whole.nodes()[1].state == "frozen"
    assert talk("ask", "meanwhile", 1) == "no answer"
    assert talk("connect", "node1", 10) == "connected"
    assert talk("ask", "new", 1) == "no answer"
    with pytest.raises(ClusterError, match="frozen"):
        whole.run(1, ["true"])
    whole.thaw(1)
    assert talk("receive", WAIT_S) == "new"
    assert output_of(whole, 1, "hostname") == "node1"


@pytest.mark.parametrize("end", ["kill", "reset"])
def test_a_frozen_node_can_be_killed_and_reset(talk: Talk, whole: VirtualCluster, end: str) -> None:
    whole.freeze(1)
    frozen_by = whole.nodes()[1].frozen_by
    getattr(whole, end)(1)
    assert not Path(frozen_by).exists()
    if end == "kill":
        assert talk("connect", "node1", 1) in NO_ANSWER
    else:
        assert talk("connect", "node1", 10) == "ECONNREFUSED"


@pytest.mark.slow
def test_a_slow_node_is_as_slow_as_asked(talk: Talk, whole: VirtualCluster) -> None:
    whole.slow(1, "40mbit")
    limit_bytes_per_s = 40e6 / 8
    # The limit is an upper bound; a busy machine may well be slower.
    assert 0.1 * limit_bytes_per_s < float(talk("rate", "node1", 160)) < 1.2 * limit_bytes_per_s
    whole.slow(1, "off")
    assert quickest_rate(talk, "node1", 160) > 2 * limit_bytes_per_s
    with pytest.raises(ClusterError, match="100mbit"):
        whole.slow(1, "fast")


@pytest.mark.slow
def test_a_delayed_node_answers_so_much_later(talk: Talk, whole: VirtualCluster) -> None:
    assert talk("connect", "node1", 10) == "connected"
    whole.delay(1, 100)
    assert float(talk("round_trip")) >= 0.2
    whole.delay(1, 10, loss_percent=5)
    assert whole.nodes()[1].state == "up, 10 ms, 5 % lost"
    assert float(talk("round_trip")) >= 0.02
    whole.delay(1, 0)
    assert float(talk("round_trip")) < 0.2
    whole.delay(1, 0, loss_percent=100)
    assert talk("ask", "hello", 1) == "no answer"
    whole.delay(1, 0)
    assert talk("receive", WAIT_S) == "hello"
    with pytest.raises(ClusterError, match="0 to 100 %"):
        whole.delay(1, 0, loss_percent=101)


@pytest.mark.slow
def test_a_delayed_node_is_killed_and_revived_as_new(talk: Talk, whole: VirtualCluster) -> None:
    whole.delay(1, 40)
    whole.kill(1)
    assert talk("connect", "node1", 1) in NO_ANSWER
    whole.revive(1)
    assert [node.state for node in whole.nodes()] == ["up", "up", "up"]
    assert talk("connect", "node1", 10) == "ECONNREFUSED"


# --- rails and leaves ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def paths() -> Iterator[VirtualCluster]:
    """Two rails; node0 and node2 on one leaf, node1 and node3 on the other. Echo servers."""
    uplink = f"{UPLINK_MBIT}mbit"
    with VirtualCluster(4, rails=2, leaves=2, uplink=uplink, rail_rate="1gbit", shm="16m") as made:
        servers = [serve(made, node) for node in (1, 2, 3)]
        yield made
        for server in servers:
            server.kill()
            server.communicate()


@pytest.fixture
def from_node0(paths: VirtualCluster) -> Iterator[Talk]:
    """With all cables as new."""
    for node in (0, 1, 2, 3):
        paths.heal(node)
        paths.slow(node, "off")
    made = Talk(paths, 0)
    yield made
    made.close()


def test_each_rail_is_a_network_of_its_own(paths: VirtualCluster, from_node0: Talk) -> None:
    code = "import socket; print(*[name for _, name in socket.if_nameindex()])"
    assert output_of(paths, 3, sys.executable, "-c", code) == "lo eth0 eth1"
    assert [node.leaf for node in paths.nodes()] == [0, 1, 0, 1]
    addresses = {paths.address(node, rail) for node in range(4) for rail in (0, 1)}
    assert len(addresses) == 8
    assert paths.address("node3") == paths.address(3, 0)
    networks = [
        {paths.address(node, rail).rpartition(".")[0] for node in range(4)} for rail in (0, 1)
    ]
    assert [len(one) for one in networks] == [1, 1]
    assert networks[0] != networks[1]
    for node in (1, 2, 3):
        for rail in (0, 1):
            assert from_node0("connect", paths.address(node, rail), 10) == "connected"


def test_one_rail_is_cut_and_the_other_one_is_whole(
    paths: VirtualCluster, from_node0: Talk
) -> None:
    first, second = paths.address(1, 0), paths.address(1, 1)
    paths.cut(1, rail=1)
    assert paths.nodes()[1].state == "up, eth1 cut"
    assert from_node0("connect", second, 0.5) in NO_ANSWER
    assert from_node0("connect", first, 10) == "connected"
    assert from_node0("connect", paths.address(2, 1), 10) == "connected"
    paths.heal(1, rail=1)
    assert from_node0("connect", second, 10) == "connected"
    paths.cut(0, peer=1, rail=0)
    assert paths.nodes()[0].state == "up, eth0 cut from node1"
    assert from_node0("connect", first, 0.5) in NO_ANSWER
    assert from_node0("connect", second, 10) == "connected"
    paths.heal(1)
    paths.cut(1)
    assert paths.nodes()[1].state == "up, cut"
    assert from_node0("connect", first, 0.5) in NO_ANSWER
    assert from_node0("connect", second, 0.5) in NO_ANSWER
    with pytest.raises(ClusterError, match="it has 2"):
        paths.cut(1, rail=2)


def test_one_rail_is_slow_and_the_other_one_is_not(paths: VirtualCluster, from_node0: Talk) -> None:
    paths.slow(2, "40mbit", rail=1)
    assert paths.nodes()[2].state == "up, eth1 slow 40mbit"
    limit_bytes_per_s = 40e6 / 8
    assert float(from_node0("rate", paths.address(2, 1), 40)) < 1.2 * limit_bytes_per_s
    assert quickest_rate(from_node0, paths.address(2, 0), 20) > 2 * limit_bytes_per_s
    paths.slow(2, "off", rail=1)
    assert quickest_rate(from_node0, paths.address(2, 1), 20) > 2 * limit_bytes_per_s


@pytest.mark.parametrize("rail", [0, 1])
def test_between_leaves_there_is_less(paths: VirtualCluster, from_node0: Talk, rail: int) -> None:
    uplink_bytes_per_s = UPLINK_MBIT * 1e6 / 8
    for node in (1, 3):
        rate = float(from_node0("rate", paths.address(node, rail), 40))
        assert 0.1 * uplink_bytes_per_s < rate < 1.2 * uplink_bytes_per_s
    assert quickest_rate(from_node0, paths.address(2, rail), 20) > 2 * uplink_bytes_per_s


def test_nodes_are_put_on_leaves_as_asked() -> None:
    with VirtualCluster(3, leaves=3, leaf_of=[2, 0, 2], shm="16m") as cluster:
        assert [node.leaf for node in cluster.nodes()] == [2, 0, 2]
        talk, server = Talk(cluster, 0), serve(cluster, 1)
        assert talk("connect", "node1", 10) == "connected"
        cluster.kill(2)
        cluster.revive(2)
        assert talk("connect", "node2", 10) == "ECONNREFUSED"
        talk.close()
        server.kill()
        server.communicate()
    with pytest.raises(ClusterError, match="for each of 3 nodes"):
        VirtualCluster(3, leaves=2, leaf_of=[0, 1])
    with pytest.raises(ClusterError, match="there is one leaf"):
        VirtualCluster(3, uplink="100mbit")
    with pytest.raises(ClusterError, match="100mbit"):
        VirtualCluster(3, leaves=2, uplink="narrow")


# --- nothing remains ----------------------------------------------------------------------------


def test_down_leaves_nothing() -> None:
    mounts = Path("/proc/self/mounts").read_text()
    links = os.listdir("/sys/class/net")
    with VirtualCluster(2) as cluster:
        holder = cluster.run(0, ["sleep", "600"])
        cluster.run(1, ["sh", "-c", "setsid sleep 600 & exit 0"]).wait(WAIT_S)
        cluster.freeze(1)
        cluster.delay(0, 1)
        had = namespaces(cluster)
        assert len(had) == 2 * len(KINDS)
        held_by = holders_of(had)
        assert {node.init for node in cluster.nodes()} < held_by
        assert cluster.name in clusters()
    assert holder.wait(WAIT_S) == -signal.SIGKILL
    assert not [one for one in held_by if is_there(one)]
    assert cluster.name not in clusters()
    assert Path("/proc/self/mounts").read_text() == mounts
    assert sorted(os.listdir("/sys/class/net")) == sorted(links)
    cluster.down()


def test_an_error_in_the_block_cleans_up() -> None:
    cluster = VirtualCluster(1)
    held_by: set[Process] = set()

    def fail() -> None:
        with cluster:
            held_by.update(holders_of(namespaces(cluster)))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert held_by
    assert not [one for one in held_by if is_there(one)]
    assert cluster.name not in clusters()


def test_two_clusters_are_apart(whole: VirtualCluster) -> None:
    server = serve(whole, 1)
    with VirtualCluster(2) as other:
        talk = Talk(other, 0)
        assert other.address(1) == whole.address(1)
        assert talk("connect", "node1", 10) == "ECONNREFUSED"
        talk.close()
    with pytest.raises(ClusterError, match="down first"):
        VirtualCluster(1, name=whole.name).up()
    server.kill()
    server.communicate()


HOLDS_A_CLUSTER = """
import signal, sys, threading
from virtual_cluster import VirtualCluster

signal.signal(signal.SIGINT, signal.default_int_handler)  # also where a shell has us ignore it

with VirtualCluster(2, name=sys.argv[1]) as cluster:
    child = cluster.run(0, ["sleep", "600"])
    print(child.pid, *[node.init.pid for node in cluster.nodes()], flush=True)
    threading.Event().wait()
"""


@pytest.fixture
def held(tmp_path: Path) -> Iterator[tuple[str, "subprocess.Popen[str]", list[int]]]:
    """A script that holds a cluster; its name, the script, and pids in the nodes."""
    name = f"held-{os.getpid()}"
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS_A_CLUSTER, name],
        env={**os.environ, "PYTHONPATH": str(SCRIPTS)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    yield name, process, [int(word) for word in process.stdout.readline().split()]
    process.kill()
    process.communicate()
    VirtualCluster(1, name=name).down()


def test_interrupt_cleans_up(held: tuple[str, "subprocess.Popen[str]", list[int]]) -> None:
    name, process, pids = held
    assert len(pids) == 3
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=WAIT_S)
    assert process.returncode == -signal.SIGINT
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert name not in clusters()


@pytest.mark.slow
def test_a_cluster_dies_with_its_owner_and_the_next_one_takes_its_name(
    held: tuple[str, "subprocess.Popen[str]", list[int]],
) -> None:
    name, process, pids = held
    process.kill()
    process.communicate(timeout=WAIT_S)
    give_up_s = time.monotonic() + WAIT_S
    while is_running := [pid for pid in pids if Path(f"/proc/{pid}/exe").exists()]:
        assert time.monotonic() < give_up_s, is_running
        time.sleep(0.01)
    assert name in clusters()
    with VirtualCluster(1, name=name) as cluster:
        assert output_of(cluster, 0, "hostname") == "node0"
    assert name not in clusters()


# --- the command line ---------------------------------------------------------------------------


@pytest.fixture
def command() -> Iterator[Callable[..., "subprocess.CompletedProcess[str]"]]:
    name = f"line-{os.getpid()}"

    def call(what: str, *words: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, COMMAND, what, "--name", name, *words],
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            check=False,
        )

    yield call
    call("down")


@pytest.mark.slow
def test_the_command_line_handles_one_cluster_in_many_calls(
    command: Callable[..., "subprocess.CompletedProcess[str]"],
) -> None:
    done = command("up", "2", "--shm", "16m")
    assert done.returncode == 0, done.stderr
    assert "node1" in done.stdout
    done = command("exec", "node1", "sh", "-c", "hostname; touch /dev/shm/here; exit 9")
    assert (done.returncode, done.stdout) == (9, "node1\n")
    assert command("exec", "1", "ls", "/dev/shm").stdout == "here\n"
    assert command("exec", "1", "sh", "-c", "kill -9 $$").returncode == 128 + 9
    states = {
        "freeze": "frozen",
        "thaw": "up",
        "cut": "up, cut",
        "heal": "up",
        "reset": "up",
        "kill": "dead",
        "revive": "up",
    }
    for what, state in states.items():
        done = command(what, "node1")
        assert done.returncode == 0, done.stderr
        assert json.loads(command("status", "--json").stdout)["nodes"][1]["state"] == state
    assert command("cut", "0", "--from", "1").returncode == 0
    assert command("slow", "1", "100mbit").returncode == 0
    assert command("delay", "1", "5", "--loss", "1").returncode == 0
    assert "up, cut from node0, slow 100mbit, 5 ms, 1 % lost" in command("status").stdout
    assert command("exec", "0", "ip", "link", "show", "eth0").returncode == 0
    assert command("exec", "1", "ls", "/dev/shm").stdout == ""
    done = command("up", "2")
    assert (done.returncode, "down first" in done.stderr) == (1, True)
    done = command("kill", "node7")
    assert (done.returncode, "node0 to node1" in done.stderr) == (1, True)
    pids = [node["init"]["pid"] for node in json.loads(command("status", "--json").stdout)["nodes"]]
    assert command("down").stdout.endswith("removed\n")
    wait_until_gone(pids)  # the process that waits for them is no child of the command's
    assert command("down").stdout.endswith("not there\n")
    assert "up N makes one" in command("status").stderr


@pytest.mark.slow
def test_the_command_line_handles_rails(
    command: Callable[..., "subprocess.CompletedProcess[str]"],
) -> None:
    words = ("--rails", "2", "--leaves", "2", "--uplink", "400mbit", "--rail-rate", "1gbit")
    done = command("up", "3", "--shm", "16m", *words)
    assert done.returncode == 0, done.stderr
    assert "leaf 1" in done.stdout
    for words, state in (
        (("cut", "2", "--rail", "1"), "up, eth1 cut"),
        (("slow", "2", "10mbit", "--rail", "0"), "up, eth0 slow 10mbit, eth1 cut"),
        (("kill", "2"), "dead"),
        (("revive", "2"), "up"),
    ):
        assert command(*words).returncode == 0
        node = json.loads(command("status", "--json").stdout)["nodes"][2]
        assert node["state"] == state
    assert len(node["cables"]) == 2
    shown = command("exec", "2", "tc", "qdisc", "show", "dev", "eth1").stdout
    assert "tbf" in shown, "a cable as new has the rate of its rail"


def test_help_shows_every_command() -> None:
    done = subprocess.run([sys.executable, COMMAND, "--help"], capture_output=True, text=True)
    for name in (
        "up",
        "exec",
        "kill",
        "revive",
        "reset",
        "cut",
        "heal",
        "freeze",
        "slow",
        "delay",
        "down",
    ):
        assert f"scripts/vcluster {name}" in textwrap.dedent(done.stdout)
