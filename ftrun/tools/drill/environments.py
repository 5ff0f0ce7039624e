"""Hosts the job of a drill: on this machine, or on nodes of a virtual cluster.

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
from typing import Any

import ftrun
from ftrun.errors import FtrunError
from ftrun.linux import end_with_parent

_OWN = ("FTRUN_", "PET_", "SLURM_")
_STOP_S = 40.0


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns a job's environment: this ftrun, one thread per rank, no variables of another run."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_OWN)}
    package = str(Path(ftrun.__file__).parents[1])
    paths = [package, *filter(None, kept.get("PYTHONPATH", "").split(os.pathsep))]
    fixed = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join(paths)}
    return {**kept, **fixed, **(extra or {})}


def scripts_folder() -> Path:
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


class JobHost:
    """Nodes on which commands are started: those of a virtual cluster, or only this machine."""

    def __init__(self, nodes: int, cluster: Any = None) -> None:
        self.nodes = nodes
        self._cluster = cluster

    def start(
        self, node: int, argv: Sequence[str], *, folder: Path, output: Path
    ) -> "subprocess.Popen[bytes]":
        with output.open("ab") as out:
            started: subprocess.Popen[bytes] = self._start(
                node, argv, folder, stdout=out, stderr=subprocess.STDOUT,
                preexec_fn=end_with_parent,  # the job ends even if the drill is killed
            )  # fmt: skip
        return started

    def ask(self, node: int, argv: Sequence[str], *, folder: Path, within_s: float) -> str:
        """Runs a command on a node; returns stdout, or raises FtrunError with the end of stderr."""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        process = self._start(node, argv, folder, **pipes)
        try:
            out, err = process.communicate(timeout=within_s)
        except subprocess.TimeoutExpired:
            raise FtrunError(f"no answer within {within_s:g} s") from None
        finally:
            if process.poll() is None:
                process.kill()
                process.communicate()
        if process.returncode != 0:
            printed = err.strip().splitlines() or [
                f"it ended with {process.returncode} and said nothing"
            ]
            raise FtrunError(printed[-1].removeprefix("Error: "))
        return str(out)

    def address(self, node: int) -> str:
        return "127.0.0.1" if self._cluster is None else str(self._cluster.address(node))

    def _start(self, node: int, argv: Sequence[str], folder: Path, **options: Any) -> Any:
        options |= {"cwd": folder, "env": environment(), "stdin": subprocess.DEVNULL}
        if self._cluster is not None:
            return self._cluster.run(node, list(argv), **options)
        # A session of its own: ^C goes to the drill only, which then ends the job.
        return subprocess.Popen(argv, start_new_session=True, **options)


@contextlib.contextmanager
def host_for(nodes: int) -> Iterator[JobHost]:
    """A host with this number of nodes; FtrunError says what is missing for that."""
    if nodes == 1:
        yield JobHost(1)
        return
    module = load_script("virtual_cluster", f"a drill on {nodes} nodes")
    if reason := module.available():
        raise FtrunError(f"a drill on {nodes} nodes needs a virtual cluster: {reason}")
    with module.VirtualCluster(nodes) as cluster:
        yield JobHost(nodes, cluster)


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
