"""Hosts the job of a drill: on this machine, or on nodes of a virtual cluster.

Runs in:  cli.
Takes in: the number of nodes; commands for them.
Gives:    child processes that end with the host; the address at which the nodes meet.

The virtual cluster is a script of ftrun that needs Linux namespaces. It is loaded only if a plan
has more than one node.
"""

import contextlib
import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import ftrun
from ftrun.errors import FtrunError
from ftrun.linux import end_with_parent

_OWN = ("FTRUN_", "PET_", "SLURM_")
_STOP_S = 40.0


class JobHost(Protocol):
    """One or several nodes on which commands are started."""

    nodes: int

    def start(
        self, node: int, argv: Sequence[str], *, folder: Path, output: Path
    ) -> "subprocess.Popen[bytes]": ...

    def ask(self, node: int, argv: Sequence[str], *, folder: Path, within_s: float) -> str:
        """Runs a command on a node; returns stdout, or raises FtrunError with the end of stderr."""
        ...

    def address(self, node: int) -> str: ...


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns a job's environment: this ftrun, one thread per rank, no variables of another run."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_OWN)}
    package = str(Path(ftrun.__file__).parents[1])
    paths = [package, *filter(None, kept.get("PYTHONPATH", "").split(os.pathsep))]
    fixed = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join(paths)}
    return {**kept, **fixed, **(extra or {})}


def scripts_folder() -> Path:
    """Returns the folder of ftrun's scripts: in the installed package, or in the checkout."""
    package = Path(ftrun.__file__).parent
    installed = package / "_data" / "scripts"
    return installed if installed.is_dir() else package.parent / "scripts"


def load_script(name: str, purpose: str) -> Any:
    """Imports a module from the scripts' folder; FtrunError if that fails."""
    folder = str(scripts_folder())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    except ImportError as error:
        missing = f"{folder}/{name}.py" if error.name == name else f"the package {error.name}"
        raise FtrunError(
            f"{purpose} is not possible with this installation: {missing} is missing. A checkout "
            "with its development packages has all of it; a plan with nodes: 1 needs none of it"
        ) from None


@contextlib.contextmanager
def host_for(nodes: int) -> Iterator[JobHost]:
    """A host with this number of nodes; FtrunError says what is missing for that."""
    if nodes == 1:
        yield LocalHost()
        return
    module = load_script("virtual_cluster", f"a drill on {nodes} nodes")
    if reason := module.available():
        raise FtrunError(f"a drill on {nodes} nodes needs a virtual cluster: {reason}")
    with module.VirtualCluster(nodes) as cluster:
        yield VirtualClusterHost(cluster, nodes)


class LocalHost:
    """This machine as the only node."""

    nodes = 1

    def start(
        self, node: int, argv: Sequence[str], *, folder: Path, output: Path
    ) -> "subprocess.Popen[bytes]":
        del node
        with output.open("ab") as out:
            return subprocess.Popen(
                argv, cwd=folder, env=environment(), stdin=subprocess.DEVNULL, stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # ^C goes to the drill only, which then ends the job
                preexec_fn=end_with_parent,  # the job ends even if the drill is killed
            )  # fmt: skip

    def ask(self, node: int, argv: Sequence[str], *, folder: Path, within_s: float) -> str:
        del node
        try:
            done = subprocess.run(
                argv, cwd=folder, env=environment(), stdin=subprocess.DEVNULL, capture_output=True,
                text=True, timeout=within_s, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise FtrunError(f"no answer within {within_s:g} s") from None
        if done.returncode != 0:
            raise FtrunError(_last_words(done.stderr, done.returncode))
        return done.stdout

    def address(self, node: int) -> str:
        del node
        return "127.0.0.1"


class VirtualClusterHost:
    """The nodes of a virtual cluster."""

    def __init__(self, cluster: Any, nodes: int) -> None:
        self.cluster = cluster
        self.nodes = nodes

    def start(
        self, node: int, argv: Sequence[str], *, folder: Path, output: Path
    ) -> "subprocess.Popen[bytes]":
        with output.open("ab") as out:
            started: subprocess.Popen[bytes] = self.cluster.run(
                node, list(argv), env=environment(), cwd=folder, stdin=subprocess.DEVNULL,
                stdout=out, stderr=subprocess.STDOUT, preexec_fn=end_with_parent,
            )  # fmt: skip
        return started

    def ask(self, node: int, argv: Sequence[str], *, folder: Path, within_s: float) -> str:
        process = self.cluster.run(
            node, list(argv), env=environment(), cwd=folder, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            out, err = process.communicate(timeout=within_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise FtrunError(f"no answer within {within_s:g} s") from None
        if process.returncode != 0:
            raise FtrunError(_last_words(err, process.returncode))
        return str(out)

    def address(self, node: int) -> str:
        return str(self.cluster.address(node))


def end(process: "subprocess.Popen[bytes]") -> None:
    """Sends SIGTERM to a run and waits for its end; kills it after 40 s."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _last_words(printed: str, code: int) -> str:
    lines = [line for line in printed.strip().splitlines() if line.strip()]
    if not lines:
        return f"it ended with {code} and said nothing"
    return lines[-1].removeprefix("Error: ")
