"""`ftrun manifest`: converts a command line of `ftrun` to a scheduler's input."""

import itertools
import os
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from ftrun.cli.launch.command_line import OWN_FLAGS
from ftrun.cli.launch.torchrun_flags import TORCHRUN_FLAGS
from ftrun.errors import FtrunError, UsageError
from ftrun.tools.manifests.job import MachineSpec, job_of
from ftrun.tools.manifests.kubernetes import KubernetesOptions, PodOptions, manifest
from ftrun.tools.manifests.slurm import SlurmOptions, batch_script

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
                    f"{flag} is an option of ftrun, not of ftrun manifest. Put -- before the words "
                    f"for ftrun: {ctx.command_path} [OPTIONS] {_WORDS}"
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


def _option(flag: str, metavar: str, text: str, **more: Any) -> Any:
    return typer.Option(flag, metavar=metavar, help=text, **more)


_Words = Annotated[
    list[str], typer.Argument(metavar="WORDS", help="options, script and arguments for ftrun")
]
_Out = Annotated[str | None, _option("--out", "FILE", "write it there")]
_Name = Annotated[str | None, typer.Option("--name", help="of the job (default: the script's)")]
_Time = Annotated[str | None, _option("--time", "T", "at most: 90m, 24h, 7d")]
_Cpus = Annotated[int | None, _option("--cpus", "N", "processors on each node", min=1)]
_Gpus = Annotated[int | None, _option("--gpus", "N", "GPUs on each node", min=1)]
_Memory = Annotated[
    str | None, _option("--memory", "SIZE", "of the training on each node; the rest is added")
]
_State = Annotated[
    str | None, _option("--state", "SIZE", "of one rank: parameters and optimizer state")
]
_LastCheckpoint = Annotated[
    str | None, _option("--last-checkpoint", "T", "to write a node's part (default: by --state)")
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
    max_requeues: Annotated[int, _option("--max-requeues", "N", "limit of requeues")] = 100,
    directives: Annotated[
        list[str] | None,
        _option("--sbatch", "OPTION", "one more, such as --constraint=ib; repeatable"),
    ] = None,
    out: _Out = None,
) -> None:
    """Write a batch script for sbatch."""
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
        str, typer.Option("--gpu-resource", help="the cluster's name of a GPU")
    ] = "nvidia.com/gpu",
    memory: _Memory = None,
    state: _State = None,
    last_checkpoint: _LastCheckpoint = None,
    shm: Annotated[str | None, _option("--shm", "SIZE", "of /dev/shm (default: computed)")] = None,
    loader_workers: Annotated[
        int, _option("--loader-workers", "N", "of each rank, for /dev/shm")
    ] = 4,
    batch: Annotated[str, _option("--batch", "SIZE", "of one batch, for /dev/shm")] = "16Mi",
    claim: Annotated[
        str | None, _option("--claim", "NAME[:PATH]", "of the volume for checkpoints")
    ] = None,
    secret: Annotated[
        str | None, typer.Option("--secret", help="name of the Secret (default: NAME-secret)")
    ] = None,
    user: Annotated[int, _option("--user", "UID", "of the pods; 0: the image's own")] = 1000,
    workdir: Annotated[str, _option("--workdir", "DIR", "where ftrun is started")] = "/workspace",
    restarts: Annotated[int, _option("--restarts", "N", "times that all pods may fail")] = 20,
    out: _Out = None,
) -> None:
    """Write a JobSet, or a TrainJob with its runtime."""
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
        raise UsageError(f"--out {out} exists already. Remove it, or name another file") from None
    except OSError as error:
        raise FtrunError(f"--out {out} cannot be written: {error.strerror}") from error
