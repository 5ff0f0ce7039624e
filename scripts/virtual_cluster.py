"""A cluster of N nodes on one machine, for tests, drills and benchmarks.

    with VirtualCluster(3) as cluster:
        server = cluster.run("node0", ["python3", "-m", "http.server"])
        cluster.run("node1", ["curl", f"http://{cluster.address('node0')}:8000"]).wait()
        cluster.kill("node0")

Takes in: the number of nodes and their network; commands to run in them; failures to inject.
Gives:    nodes node0, node1 ... with an address, hostname, /etc/hosts, /dev/shm, /run, processes
          and process ids of their own, on a network of their own. Everything else is the
          machine's, above all the file system. `run` gives children of the caller. With several
          rails a node has eth0, eth1 ..., each in another network. With several leaves not all
          nodes of a rail are connected to the same switch (see virtual_link).
Survives: nothing of a cluster in a `with` block, however the block or its process ends; a cluster
          of the command line (`scripts/vcluster`) lives until `down`.

Rule 1: the state of a cluster is in its folder, so that several processes can handle it. It is
        read and written under a lock. A pid alone never identifies a process (see virtual_node).
Rule 2: a process that holds a namespace stays alive only after it is recorded: until then it
        waits for a line from the process that records it.
"""

import contextlib
import functools
import os
import re
import secrets
import shutil
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import virtual_link as link
import virtual_node as node_of
from virtual_node import ClusterError, Holder, Process
from virtual_state import (
    Cable,
    Network,
    Node,
    State,
    alive,
    checked,
    clusters,
    find,
    locked,
    root,
)

__all__ = ["ClusterError", "Node", "VirtualCluster", "available", "clusters"]

_SHM = re.compile(r"\d+[kmg]?", re.IGNORECASE)
_COMMANDS = ("ip", "tc", "nsenter", "unshare", "mount", "sh", "env", "sleep")
_ROOTLESS = "unshare --user --map-root-user --pid --fork --mount-proc COMMAND"
_PROBE = """
mount -t proc proc /proc && mount -t tmpfs tmpfs /run &&
ip link add br0 type bridge && ip link add p0 type veth peer name eth0 &&
env --ignore-signal=CHLD true
"""

_commands: list[subprocess.Popen[Any]] = []
"""Processes that this process started in nodes and did not reap yet."""
_commands_lock = threading.Lock()


@functools.cache
def available() -> str | None:
    """The reason why a virtual cluster is not possible here; None if it is possible."""
    missing = [command for command in _COMMANDS if shutil.which(command) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (Debian: iproute2, util-linux, coreutils)"
    spaces = ["--pid", "--fork", "--net", "--mount", "--uts", "--ipc"]
    done = subprocess.run(
        ["unshare", *spaces, "--", "sh", "-c", _PROBE],
        capture_output=True,
        text=True,
        timeout=node_of.WAIT_S,
        check=False,
    )
    said = done.stderr.strip().splitlines()
    if done.returncode != 0:
        reason = said[-1] if said else f"exit {done.returncode}"
    elif node_of.may_come_back():
        return None
    else:
        reason = "the pid namespace of this process is not its own"
    return f"no rights to namespaces ({reason}): be root, or under `{_ROOTLESS}`"


class VirtualCluster:
    """N nodes on this machine. A node is identified by node0, node1 ..., or by its number."""

    def __init__(
        self,
        nodes: int,
        *,
        name: str = "",
        shm: str = "2g",
        kept: bool = False,
        clock_step_s: int = 0,
        **network: Any,
    ) -> None:
        """Prepares a cluster; it starts with `up`, or with a `with` block.

        `shm`: size of each node's /dev/shm (bytes, or with k, m, g); it takes memory when used.
        `kept`: it outlives this process. `clock_step_s`: the monotonic clocks of each node are
        this far ahead of those of the node before it. `network`: rails=2, leaves=2,
        uplink="400mbit" ..., see Network. Raises: ClusterError: a number, name, size or rate is
        wrong.
        """
        if not 1 <= nodes <= link.MAX_NODES:
            raise ClusterError(f"{nodes} nodes: 1 to {link.MAX_NODES} are possible")
        self._network = link.checked(Network(**network), nodes)
        if not _SHM.fullmatch(shm):
            raise ClusterError(f"a /dev/shm of {shm!r}: bytes, or such as 512m or 2g")
        self.name = checked(name or f"{os.getpid()}-{secrets.token_hex(3)}")
        self._count = nodes
        self._shm = shm
        self._kept = kept
        self._clock_step_s = clock_step_s
        self._holders: dict[str, Holder] = {}

    @staticmethod
    def existing(name: str) -> "VirtualCluster":
        """The cluster of that name, started by any process. Raises: ClusterError: there is none."""
        state = State.load(root() / checked(name))
        if state is None:
            raise ClusterError(f"there is no cluster {name!r}: scripts/vcluster up N makes one")
        return VirtualCluster(len(state.nodes), name=name, shm=state.shm, kept=True)

    def __enter__(self) -> "VirtualCluster":
        self.up()
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    # --- all of it -----------------------------------------------------------------------------

    def up(self) -> None:
        """Start it; remains of earlier runs are removed.

        Raises: ClusterError: it is not possible here (see `available`), or the name is taken.
        """
        if reason := available():
            raise ClusterError(f"no virtual cluster: {reason}")
        with locked():
            _remove_left_overs()
            if self._folder.exists():
                raise ClusterError(f"cluster {self.name!r} exists: scripts/vcluster down first")
            owner = None if self._kept else Process.of(os.getpid())
            state = State(self.name, self._shm, owner, self._network)
            try:
                self._start(state)
            except BaseException:
                self._remove(state)
                raise

    def down(self) -> None:
        """Remove all of it; it succeeds also if there was no cluster."""
        with locked():
            state = State.load(self._folder)
            self._remove(state or State(self.name, self._shm, None))

    def nodes(self) -> list[Node]:
        """The recorded state of each node."""
        return self._known().nodes

    def address(self, node: int | str, rail: int = 0) -> str:
        return self._known_node(node).cables[rail].address

    # --- one node --------------------------------------------------------------------------------

    def run(
        self,
        node: int | str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> "subprocess.Popen[Any]":
        """Start a command in a node. `options` are Popen's (stdout, stderr, text ...).

        The command is a child of the caller, which waits for it; signals and exit code are its own.
        It dies with the node. XDG_RUNTIME_DIR is the node's. Raises: ClusterError: the node is dead
        or frozen.
        """
        found = self._known_node(node)
        init = alive(found)
        if found.frozen_by:
            raise ClusterError(f"{found.name} is frozen and runs nothing: thaw it first")
        variables = dict(os.environ if env is None else env)
        variables["XDG_RUNTIME_DIR"] = f"/run/user/{os.getuid()}"
        folder = os.path.abspath(cwd or os.getcwd())
        command = node_of.start_in(init, argv, env=variables, cwd=folder, **options)
        _reap_commands()
        with _commands_lock:
            _commands.append(command)
        return command

    def kill(self, node: int | str) -> None:
        """Cut its power: every process dies at once, and no packet informs the other nodes."""
        with self._changing(node) as (state, found):
            switch = _switch(state)
            for port in link.ports(found):
                switch.cut(port)
            self._end(state, found)
            for port in link.ports(found):
                switch.unplug(port)

    def reset(self, node: int | str) -> None:
        """Kill every process; its kernel lives and informs the peers (FIN, RST) at once.

        Address, namespaces and /dev/shm stay, and it can run new commands.
        """
        with self._changing(node) as (_, found):
            node_of.signal_all(alive(found), "KILL")
            self._thaw(found)
            _reap_commands()

    def revive(self, node: int | str) -> None:
        """Start a dead node again: empty, with the old name and address, and a new cable."""
        with self._changing(node) as (state, found):
            if found.is_alive:
                raise ClusterError(f"{found.name} is alive: kill it first")
            self._end(state, found)  # it may have ended without `kill`
            for port in link.ports(found):
                _switch(state).unplug(port)
                for peer in state.nodes:
                    link.join(found, peer, port.rail)
            found.cables = [Cable(cable.address) for cable in found.cables]
            try:
                self._start_nodes(state, [found])
            except BaseException:
                self._end(state, found)
                raise

    def cut(
        self,
        node: int | str,
        *,
        peer: int | str | None = None,
        rail: int | None = None,
        is_one_way: bool = False,
    ) -> None:
        """Cut its cables, or drop only the packets between it and `peer`. All processes stay alive.

        `rail`: only on this one. `is_one_way`: drop only what it sends to `peer`.
        """
        with self._changing(node) as (state, found):
            for port in link.ports(found, rail):
                if peer is None:
                    _switch(state).cut(port)
                    found.cables[port.rail].is_cut = True
                else:
                    link.part(found, find(state, peer), port.rail, is_one_way=is_one_way)

    def heal(
        self, node: int | str, *, peer: int | str | None = None, rail: int | None = None
    ) -> None:
        """Undo `cut`: one pair, or without `peer` all of the node's cuts; `rail`: on this one."""
        with self._changing(node) as (state, found):
            for port in link.ports(found, rail):
                if peer is None:
                    alive(found)
                    _switch(state).heal(port)
                    found.cables[port.rail].is_cut = False
                for other in state.nodes if peer is None else [find(state, peer)]:
                    link.join(found, other, port.rail)

    def freeze(self, node: int | str) -> None:
        """Freeze every process. The kernel accepts and acknowledges; no process answers."""
        with self._changing(node) as (_, found):
            init = alive(found)
            if found.frozen_by:
                return
            try:
                found.frozen_by = str(node_of.freeze(init, f"ftrun-{self.name}-{found.name}"))
            except OSError:  # cgroups cannot be changed here
                node_of.signal_all(init, "STOP")
                found.frozen_by = "signals"

    def thaw(self, node: int | str) -> None:
        """Let its processes continue."""
        with self._changing(node) as (_, found):
            alive(found)
            self._thaw(found)

    def slow(
        self,
        node: int | str,
        rate: str,
        *,
        rail: int | None = None,
        way: str = "both",
        peer: int | str | None = None,
    ) -> None:
        """Limit its cables in both directions to a rate such as 100mbit; `off` ends that.

        `rail`: only this one. `way`: only what it `sends` or `receives`. `peer`: only what it sends
        to this node.
        """
        wanted = "" if rate == "off" else rate
        if wanted:
            link.bits_per_s(wanted)
        with self._changing(node) as (state, found):
            ports = link.ports(found, rail)
            limit = wanted or state.network.rail_rate
            if peer is not None:
                cables = find(state, peer).cables
                to = {port.device: cables[port.rail].address for port in ports}
                link.limit_to(alive(found), to, wanted, state.network.rail_rate)
            if peer is None and way != "receives":
                link.limit(alive(found), [port.device for port in ports], limit)
            if peer is None and way != "sends":
                link.limit(_switch(state).process, [port.name for port in ports], limit)
            for port in ports:
                found.cables[port.rail].rate = wanted

    def delay(
        self, node: int | str, ms: float, *, loss_percent: float = 0.0, rail: int | None = None
    ) -> None:
        """Delay its cables by this time in each direction; 0 without loss restores them.

        Connections survive it. `loss_percent`: of the frames; up to 64 KiB of TCP are one. `rail`:
        only this one. Raises: ClusterError: a number is wrong, or /dev/net/tun does not exist.
        """
        if not 0 <= ms <= link.MAX_DELAY_MS or not 0 <= loss_percent <= 100:
            raise ClusterError(
                f"{ms} ms, {loss_percent} % lost: 0 to {link.MAX_DELAY_MS} ms and 0 to 100 %"
            )
        with self._changing(node) as (state, found):
            alive(found)
            for port in link.ports(found, rail):
                self._end_delay(state, found, port)
                if ms or loss_percent:
                    self._start_delay(state, found, port, (ms, loss_percent))

    # --- how -------------------------------------------------------------------------------------

    @property
    def _folder(self) -> Path:
        return root() / self.name

    def _known(self) -> State:
        state = State.load(self._folder)
        if state is None:
            raise ClusterError(f"cluster {self.name!r} is not up")
        return state

    def _known_node(self, node: int | str) -> Node:
        return find(self._known(), node)

    @contextlib.contextmanager
    def _changing(self, node: int | str) -> Iterator[tuple[State, Node]]:
        """The state and one node, to be changed; written also after a failure."""
        with locked():
            state = self._known()
            try:
                yield state, find(state, node)
            finally:
                state.dump(self._folder)

    def _start(self, state: State) -> None:
        self._folder.mkdir(mode=0o700)
        names = [f"node{index}" for index in range(self._count)]
        rails = range(state.network.rails)
        for index, name in enumerate(names):
            cables = [Cable(link.address(index, rail)) for rail in rails]
            state.nodes.append(Node(name, index, cables, state.network.leaf(index)))
        hosts = ["127.0.0.1 localhost", "::1 localhost ip6-localhost"]
        hosts += [f"{node.address} {node.name}" for node in state.nodes]
        (self._folder / "hosts").write_text("\n".join(hosts) + "\n")
        switch = self._hold("switch", link.switch_command(self.name))
        state.switch = switch.process()
        state.dump(self._folder)
        switch.go()
        switch.wait_ready()
        _switch(state).make_bridges(state.network)
        self._start_nodes(state, state.nodes)

    def _start_nodes(self, state: State, nodes: list[Node]) -> None:
        """Start all at once, because most of the time is spent in the kernel."""
        started = [(node, self._hold(node.name, self._init_command(node))) for node in nodes]
        for node, holder in started:
            node.init = holder.process()
        state.dump(self._folder)
        cables = {port: alive(node) for node in nodes for port in link.ports(node)}
        _switch(state).plug(cables, state.network.rail_rate)
        for _, holder in started:
            holder.go()
        for _, holder in started:
            holder.wait_ready()
        if rate := state.network.rail_rate:
            for node in nodes:
                link.limit(alive(node), [port.device for port in link.ports(node)], rate)
        self._let_go()

    def _init_command(self, node: Node) -> list[str]:
        hosts = str(self._folder / "hosts")
        addresses = " ".join(cable.address for cable in node.cables)
        clock_s = self._clock_step_s * int(node.name.removeprefix("node"))
        return node_of.init_command(node.name, hosts, self._shm, addresses, clock_s=clock_s)

    def _hold(self, name: str, command: list[str]) -> Holder:
        log = self._folder / f"{name}.log"
        self._holders[name] = Holder(name, command, log, is_owned=not self._kept)
        return self._holders[name]

    def _end(self, state: State, node: Node) -> None:
        """End all its processes, and remove their resources."""
        if node.init is not None:
            node_of.kill_node(node.init)
        for port in link.ports(node):
            self._end_delay(state, node, port)
        self._thaw(node)
        node.init = None
        _reap_commands()
        self._reap(node.name)

    def _start_delay(
        self, state: State, node: Node, port: link.Port, how: tuple[float, float]
    ) -> None:
        switch, cable = _switch(state), node.cables[port.rail]
        holder = self._hold(_delayer(port), switch.delay_command(port, *how))
        cable.delayer = holder.process()
        state.dump(self._folder)
        holder.go()
        holder.wait_ready()
        switch.lengthen(port)
        cable.delay_ms, cable.loss_percent = how
        self._let_go()

    def _end_delay(self, state: State, node: Node, port: link.Port) -> None:
        cable = node.cables[port.rail]
        if cable.delayer is not None:
            if state.switch is not None and state.switch.is_alive:
                _switch(state).shorten(port)
            cable.delayer.kill()
            cable.delayer.wait()
        cable.delayer = None
        cable.delay_ms = cable.loss_percent = 0.0
        self._reap(_delayer(port))

    def _let_go(self) -> None:
        """Release a cluster that shall outlive this process."""
        if self._kept:
            for name in list(self._holders):
                self._holders.pop(name).let_go()

    def _thaw(self, node: Node) -> None:
        if node.frozen_by == "signals":
            if node.init is not None and node.init.is_alive:
                node_of.signal_all(node.init, "CONT")
        elif node.frozen_by:
            node_of.thaw(Path(node.frozen_by))
        node.frozen_by = ""

    def _remove(self, state: State) -> None:
        with contextlib.ExitStack() as rest:  # the rest is removed also after a failure
            rest.callback(shutil.rmtree, self._folder, ignore_errors=True)
            for name in list(self._holders):
                rest.callback(self._reap, name)
            if state.switch is not None:
                rest.callback(state.switch.wait)
                rest.callback(state.switch.kill)
            for node in state.nodes:
                rest.callback(self._end, state, node)

    def _reap(self, name: str) -> None:
        if name in self._holders:
            self._holders.pop(name).reap()


def _reap_commands() -> None:
    """Reap the commands that have ended. Their exit codes stay in the Popen that the caller has.

    The first process of a node does not end before the others are reaped.
    """
    with _commands_lock:
        _commands[:] = [command for command in _commands if command.poll() is None]


def _delayer(port: link.Port) -> str:
    return f"delay-{port.name}"


def _switch(state: State) -> link.Switch:
    if state.switch is None or not state.switch.is_alive:
        raise ClusterError(f"cluster {state.name!r} has lost its network: scripts/vcluster down")
    return link.Switch(state.switch)


def _remove_left_overs() -> None:
    for name in clusters():
        state = State.load(root() / name)
        if state is None or state.is_left_over:
            state = state or State(name, "1m", None)
            VirtualCluster(1, name=name, kept=True)._remove(state)
