"""A real Slurm over a virtual cluster, for tests: its own slurmctld, slurmd and munged.

    with VirtualSlurm(3) as slurm:
        step = slurm.srun(["-N3", "--ntasks-per-node=1", "hostname"], stdout=subprocess.PIPE)
        slurm.kill("node3")

Takes in: the number of compute nodes; commands for its users.
Gives:    node0, where users log in and slurmctld runs, and node1, node2 ... with a slurmd each.
Survives: nothing: all daemons die with their nodes, and the folder with the `with` block.

Needs root, and Debian's slurmctld, slurmd, slurm-client and munge. It does not touch a Slurm that
is installed and in use here: configuration, keys, sockets and ports are this cluster's.

Rule 1: no daemon goes into the background, so that each is a child of the caller and dies with
        its node.
"""

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from virtual_cluster import ClusterError, VirtualCluster
from virtual_cluster import available as cluster_available

NODE_DOWN_S = 6
"""Time without an answer after which a node is DOWN. Slurm's own default is 300."""

KILL_WAIT_S = 30
"""Slurm's default: from SIGTERM of a cancelled job to SIGKILL."""

_CREDENTIAL_S = 5
"""Delay before a requeued job begins. Slurm's own default is 120."""

_CPUS = 4
_MEMORY_MB = 2000
_START_S = 60.0
_POLL_S = 0.1
_LAST_LINES = 12
_SBIN = ("/usr/sbin", "/sbin")
_NEEDED = ("slurmctld", "slurmd", "srun", "sinfo", "scancel", "munged")


def available() -> str | None:
    """The reason why Slurm is not possible here; None if it is possible."""
    search = _with_daemons(os.environ)["PATH"]
    missing = [name for name in _NEEDED if shutil.which(name, path=search) is None]
    if missing:
        packages = "slurmctld, slurmd, slurm-client, munge"
        return f"not installed: {', '.join(missing)} (Debian: {packages})"
    if os.geteuid() != 0:
        return "slurmd starts its tasks as root only"
    return cluster_available()


class VirtualSlurm:
    """Slurm on node1 ... nodeN, and a node0 to use it from."""

    def __init__(self, nodes: int, *, shm: str = "256m", cpus: int = _CPUS) -> None:
        self.names = [f"node{index}" for index in range(1, nodes + 1)]
        self.cluster = VirtualCluster(nodes + 1, shm=shm)
        self._cpus = cpus
        self._folder = Path()
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> "VirtualSlurm":
        self.up()
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    # --- all of it ----------------------------------------------------------------------------

    def up(self) -> None:
        """Start it, and wait until every node may be used.

        Raises: ClusterError: it is not possible here (see `available`), or it does not start.
        """
        if reason := available():
            raise ClusterError(f"no Slurm: {reason}")
        # A short path: a unix socket's name has 107 characters at most.
        self._folder = Path(tempfile.mkdtemp(prefix="ftrun-slurm-"))
        self._folder.chmod(0o755)
        try:
            self.cluster.up()
            self._write_files()
            self._start_munge()
            self._start("slurmctld", "node0", ["slurmctld", "-i", "-D"])
            for name in self.names:
                self._start_slurmd(name)
            self.wait_until_idle(*self.names)
        except BaseException:
            self.down()
            raise

    def down(self) -> None:
        """Remove all of it."""
        with contextlib.ExitStack() as rest:  # the rest is removed also after a failure
            rest.callback(shutil.rmtree, self._folder, ignore_errors=True)
            rest.callback(self._reap)
            rest.callback(self.cluster.down)

    # --- using it -----------------------------------------------------------------------------

    def srun(
        self, words: Sequence[object], *, env: Mapping[str, str] | None = None, **options: Any
    ) -> "subprocess.Popen[Any]":
        """`srun` with these arguments on node0, as a child of the caller. `options`: Popen's."""
        return self.run(["srun", *words], env=env, **options)

    def run(
        self, words: Sequence[object], *, env: Mapping[str, str] | None = None, **options: Any
    ) -> "subprocess.Popen[Any]":
        """A command on node0, which uses this Slurm."""
        variables = self._variables(os.environ if env is None else env)
        return self.cluster.run("node0", [str(word) for word in words], env=variables, **options)

    def ask(self, *words: object) -> str:
        """The output of a command on node0, such as `ask("squeue", "-h", "-o", "%i %T")`.

        Raises: ClusterError: it does not succeed.
        """
        command = self.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        output, _ = command.communicate(timeout=_START_S)
        if command.returncode != 0:
            raise ClusterError(f"{words[0]} ended with {command.returncode}: {output.strip()}")
        return str(output).strip()

    def states(self) -> dict[str, str]:
        """Of every node, as in sinfo: idle, mixed, down* ...; empty while there is no answer."""
        with contextlib.suppress(ClusterError):
            lines = self.ask("sinfo", "--noheader", "--Node", "--format=%N %t").splitlines()
            return dict(line.split(maxsplit=1) for line in lines)
        return {}

    def wait_until_idle(self, *names: str) -> None:
        """Raises: ClusterError: a node is not usable within a minute."""
        self.wait_until(lambda states: all(states.get(name) == "idle" for name in names))

    def wait_until_down(self, name: str) -> None:
        """Until Slurm has marked it. Raises: ClusterError: it does not, within a minute."""
        self.wait_until(lambda states: states.get(name, "").startswith("down"))

    def wait_until(self, is_so: Any) -> None:
        give_up_s = time.monotonic() + _START_S
        while not is_so(states := self.states()):
            self._check_daemons()
            if time.monotonic() > give_up_s:
                raise ClusterError(f"the nodes are {states or 'not there'}:\n{self.log()}")
            time.sleep(_POLL_S)

    # --- breaking it --------------------------------------------------------------------------

    def kill(self, name: str) -> None:
        """Power it off."""
        self.cluster.kill(name)
        self._daemons.pop(name, None)

    def revive(self, name: str) -> None:
        """Start it again, empty, with a slurmd."""
        self.cluster.revive(name)
        self._start_slurmd(name)

    def log(self) -> str:
        """The end of every daemon's log."""
        found = []
        for path in sorted(self._folder.glob("*.log")):
            lines = path.read_text(errors="replace").splitlines()[-_LAST_LINES:]
            found += [f"  {path.stem}:", *(f"    {line}" for line in lines)]
        return "\n".join(found)

    # --- how ----------------------------------------------------------------------------------

    def _variables(self, given: Mapping[str, str]) -> dict[str, str]:
        return {**_with_daemons(given), "SLURM_CONF": str(self._folder / "slurm.conf")}

    def _write_files(self) -> None:
        (self._folder / "slurm.conf").write_text(self._configuration())
        key = self._folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(os.urandom(128))
        (self._folder / "state").mkdir()

    def _configuration(self) -> str:
        settings = {
            "ClusterName": "virtual",
            "SlurmctldHost": f"node0({self.cluster.address('node0')})",
            "SlurmUser": "root",
            "SlurmdUser": "root",
            "AuthType": "auth/munge",
            "AuthInfo": f"socket={self._folder}/munge.socket,cred_expire={_CREDENTIAL_S}",
            "CredType": "cred/munge",
            "StateSaveLocation": f"{self._folder}/state",
            "SlurmdSpoolDir": f"{self._folder}/spool-%n",
            "SlurmctldPidFile": f"{self._folder}/slurmctld.pid",
            "SlurmdPidFile": f"{self._folder}/%n.pid",
            # No cgroup, no systemd: processes are identified by their parents.
            "ProctrackType": "proctrack/linuxproc",
            "TaskPlugin": "task/none",
            "JobAcctGatherType": "jobacct_gather/none",
            "AccountingStorageType": "accounting_storage/none",
            "SwitchType": "switch/none",
            "MpiDefault": "none",
            "MailProg": "/bin/true",
            "SchedulerType": "sched/builtin",
            "SchedulerParameters": "batch_sched_delay=0,sched_interval=1,interval=1",
            "SelectType": "select/cons_tres",
            "SelectTypeParameters": "CR_CPU",
            "SlurmdParameters": "config_overrides",  # as many CPUs as are written below
            "ReturnToService": "2",
            "TreeWidth": "65533",  # slurmctld speaks to every node itself
            "SlurmdTimeout": str(NODE_DOWN_S),
            "KillWait": str(KILL_WAIT_S),
        }
        lines = [f"{key}={value}" for key, value in settings.items()]
        what = f"CPUs={self._cpus} RealMemory={_MEMORY_MB} State=UNKNOWN"
        lines += [
            f"NodeName={name} NodeAddr={self.cluster.address(name)} {what}" for name in self.names
        ]
        nodes = ",".join(self.names)
        lines += [f"PartitionName=main Nodes={nodes} Default=YES MaxTime=INFINITE State=UP", ""]
        return "\n".join(lines)

    def _start_munge(self) -> None:
        folder = self._folder
        words = ["munged", "--foreground", "--force", f"--key-file={folder}/munge.key"]
        words += [f"--socket={folder}/munge.socket", f"--pid-file={folder}/munged.pid"]
        words += [f"--log-file={folder}/munged.log", f"--seed-file={folder}/munge.seed"]
        self._start("munged", "node0", words)
        give_up_s = time.monotonic() + _START_S
        while not (folder / "munge.socket").exists():
            self._check_daemons()
            if time.monotonic() > give_up_s:
                raise ClusterError(f"munged makes no socket:\n{self.log()}")
            time.sleep(_POLL_S)

    def _start_slurmd(self, name: str) -> None:
        (self._folder / f"spool-{name}").mkdir(exist_ok=True)
        self._start(name, name, ["slurmd", "-D", "-N", name])

    def _start(self, what: str, node: str, words: list[str]) -> None:
        with (self._folder / f"{what}.log").open("ab") as output:
            self._daemons[what] = self.cluster.run(
                node,
                words,
                env=self._variables(os.environ),
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def _check_daemons(self) -> None:
        for what, process in self._daemons.items():
            if process.poll() is not None:
                raise ClusterError(f"{what} ended with {process.returncode}:\n{self.log()}")

    def _reap(self) -> None:
        for process in self._daemons.values():
            process.wait(_START_S)
        self._daemons.clear()


def _with_daemons(given: Mapping[str, str]) -> dict[str, str]:
    """Variables with which programs for administrators are found as well."""
    return {**given, "PATH": os.pathsep.join([given.get("PATH", os.defpath), *_SBIN])}
