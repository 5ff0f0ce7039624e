"""`ftrun manifest`: converts a command line of `ftrun` to a scheduler's input."""

import itertools
import os
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from ftrun.cli.completion import option, with_groups
from ftrun.cli.launch.command_line import OWN_FLAGS
from ftrun.cli.launch.torchrun_flags import TORCHRUN_FLAGS
from ftrun.errors import FtrunError, UsageError
from ftrun.tools.manifests.job import JobOptions, MachineSpec, job_of
from ftrun.tools.manifests.kubernetes import RUNTIME, KubernetesOptions, manifest
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
    help="Write a batch script for Slurm, or a manifest for Kubernetes or Kubeflow.",
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
)


_Words = Annotated[
    list[str], typer.Argument(metavar="WORDS", help="options, script and arguments for ftrun")
]
_FlagWords = Annotated[
    list[str] | None, typer.Argument(metavar="WORDS", help="options for ftrun; a script")
]
_Out = Annotated[str | None, option("--out", "write it there", "FILE")]


@app.command("slurm", cls=_Command)
@with_groups
def _slurm(
    words: _Words, options: JobOptions, machine: MachineSpec, place: SlurmOptions, out: _Out = None
) -> None:
    """Write a batch script for sbatch."""
    _give(batch_script(job_of(words, machine, options), place), out, is_script=True)


@app.command("kubernetes", cls=_Command)
@with_groups
def _kubernetes(
    words: _Words,
    place: KubernetesOptions,
    options: JobOptions,
    machine: MachineSpec,
    kind: Annotated[str, option("--kind", "jobset or trainjob")] = "jobset",
    out: _Out = None,
) -> None:
    """Write a JobSet, or a TrainJob with its runtime."""
    _give(manifest(job_of(words, machine, options), place, kind), out)


@app.command("kubeflow", cls=_Command)
@with_groups
def _kubeflow(
    place: KubernetesOptions,
    options: JobOptions,
    machine: MachineSpec,
    words: _FlagWords = None,
    out: _Out = None,
) -> None:
    """Write a ClusterTrainingRuntime of Kubeflow Trainer 2, for TrainJobs in any namespace.

    A TrainJob gives the script in trainer.args. With a script here, a TrainJob is written too.
    """
    job = job_of(words or [], machine, options, needs_script=False)
    _give(manifest(job, place, RUNTIME), out)


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
