"""Implements `ftrun render`: converts a command line of `ftrun` to a scheduler's input.

Runs in:  cli.
Takes in: its own options, and after `--` the flags, script and arguments for `ftrun`.
Gives:    a batch script for Slurm, or manifests for Kubernetes, on stdout or in a file.
"""

import itertools
import os
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from ftrun.cli.launch.command_line import OWN_FLAGS
from ftrun.cli.launch.torchrun_flags import TORCHRUN_FLAGS
from ftrun.errors import FtrunError, UsageError

_OF_FTRUN = (*OWN_FLAGS, *TORCHRUN_FLAGS)
_WORDS = "-- [FTRUN_OPTIONS] SCRIPT [ARGS...]"


class _Command(TyperCommand):
    """Command whose last words belong to another command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        own = {spelling for option in self.params for spelling in option.opts}
        for word in itertools.takewhile(lambda word: word != "--", args):
            flag = word.partition("=")[0]
            if flag not in own and any(flag in known.spellings for known in _OF_FTRUN):
                raise UsageError(
                    f"{flag} is an option of ftrun, not of ftrun render. Put -- before the words "
                    f"that ftrun is to be given: {ctx.command_path} [OPTIONS] {_WORDS}"
                )
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return ["[OPTIONS]", _WORDS]


app = typer.Typer(
    help="Write a batch script for Slurm or a manifest for Kubernetes.",
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
)

_Words = Annotated[
    list[str], typer.Argument(metavar="WORDS", help="options, script and words of ftrun")
]
_Out = Annotated[str | None, typer.Option("--out", metavar="FILE", help="write it there")]
_Name = Annotated[str | None, typer.Option("--name", help="of the job (default: the script's)")]
_Time = Annotated[str | None, typer.Option("--time", metavar="T", help="at most: 90m, 24h, 7d")]
_Cpus = Annotated[
    int | None, typer.Option("--cpus", metavar="N", min=1, help="processors on each node")
]
_Gpus = Annotated[int | None, typer.Option("--gpus", metavar="N", min=1, help="GPUs on each node")]
_Memory = Annotated[
    str | None,
    typer.Option(
        "--memory", metavar="SIZE", help="of the training itself on each node; the rest is added"
    ),
]
_State = Annotated[
    str | None,
    typer.Option("--state", metavar="SIZE", help="of one rank: parameters and optimizer state"),
]
_LastCheckpoint = Annotated[
    str | None,
    typer.Option(
        "--last-checkpoint", metavar="T", help="a node writes its part in (default: by --state)"
    ),
]


@app.command("slurm", cls=_Command)
def _slurm(  # noqa: PLR0913 - its flags
    words: _Words,
    name: _Name = None,
    time: _Time = None,
    cpus: _Cpus = None,
    gpus: _Gpus = None,
    memory: _Memory = None,
    state: _State = None,
    last_checkpoint: _LastCheckpoint = None,
    partition: Annotated[str | None, typer.Option("--partition", help="of the cluster")] = None,
    account: Annotated[str | None, typer.Option("--account", help="that pays")] = None,
    max_requeues: Annotated[
        int, typer.Option("--max-requeues", metavar="N", help="queued again so often at most")
    ] = 100,
    directives: Annotated[
        list[str] | None,
        typer.Option("--sbatch", metavar="OPTION", help="one more, as --constraint=ib; repeatable"),
    ] = None,
    out: _Out = None,
) -> None:
    """Write a batch script for sbatch."""
    from ftrun.tools.manifests.job import MachineSpec, job_of
    from ftrun.tools.manifests.slurm import SlurmOptions, batch_script

    machine = MachineSpec(cpus, gpus, memory, state)
    job = job_of(words, machine=machine, name=name, time=time, last_checkpoint=last_checkpoint)
    place = SlurmOptions(partition, account, max_requeues, directives or [])
    _give(batch_script(job, place), out, is_script=True)


@app.command("kubernetes", cls=_Command)
def _kubernetes(  # noqa: PLR0913 - its flags
    words: _Words,
    image: Annotated[str, typer.Option("--image", help="has ftrun, torch and the script")],
    kind: Annotated[str, typer.Option("--kind", help="jobset or trainjob")] = "jobset",
    name: _Name = None,
    namespace: Annotated[str | None, typer.Option("--namespace", help="not given: none")] = None,
    time: _Time = None,
    cpus: _Cpus = None,
    gpus: _Gpus = None,
    gpu_resource: Annotated[
        str, typer.Option("--gpu-resource", help="what the cluster calls a GPU")
    ] = "nvidia.com/gpu",
    memory: _Memory = None,
    state: _State = None,
    last_checkpoint: _LastCheckpoint = None,
    shm: Annotated[
        str | None, typer.Option("--shm", metavar="SIZE", help="of /dev/shm (default: reckoned)")
    ] = None,
    loader_workers: Annotated[
        int, typer.Option("--loader-workers", metavar="N", help="of each rank, for /dev/shm")
    ] = 4,
    batch: Annotated[
        str, typer.Option("--batch", metavar="SIZE", help="of one batch, for /dev/shm")
    ] = "16Mi",
    claim: Annotated[
        str | None,
        typer.Option("--claim", metavar="NAME[:PATH]", help="of the volume for checkpoints"),
    ] = None,
    secret: Annotated[
        str | None, typer.Option("--secret", help="name of the Secret (default: NAME-secret)")
    ] = None,
    user: Annotated[
        int, typer.Option("--user", metavar="UID", help="of the pods; 0: as the image says")
    ] = 1000,
    workdir: Annotated[
        str, typer.Option("--workdir", metavar="DIR", help="where ftrun is started")
    ] = "/workspace",
    restarts: Annotated[
        int, typer.Option("--restarts", metavar="N", help="all pods may fail so often")
    ] = 20,
    out: _Out = None,
) -> None:
    """Write a JobSet, or a TrainJob with its runtime."""
    from ftrun.tools.manifests.job import MachineSpec, job_of
    from ftrun.tools.manifests.kubernetes import KubernetesOptions, manifest
    from ftrun.tools.manifests.volumes import PodOptions

    machine = MachineSpec(cpus, gpus, memory, state)
    job = job_of(words, machine=machine, name=name, time=time, last_checkpoint=last_checkpoint)
    place = PodOptions(
        image, claim, secret, user, workdir, shm, loader_workers, batch, gpu_resource
    )
    _give(manifest(job, place, KubernetesOptions(kind, namespace, restarts)), out)


def _give(text: str, out: str | None, *, is_script: bool = False) -> None:
    """Prints the text, or writes it to a file that must not exist."""
    if out is None or out == "-":
        typer.echo(text, nl=False)
        return
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        fd = os.open(out, flags, 0o777 if is_script else 0o666)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"--out {out} is there already. Remove it, or name another file") from None
    except OSError as error:
        raise FtrunError(f"--out {out} cannot be written: {error.strerror}") from error
