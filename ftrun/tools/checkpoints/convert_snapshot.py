"""`ftrun snapshots convert`: a checkpoint of another layout.

Runs in:  cli. The work is done by a process of the SMP's folder, started for it.
Takes in: the words of the command line.
Gives:    what was made, in words or as JSON; 2 where the rules do not fit, 77 where the
          checkpoint cannot be read or the new one not be written.
"""

import subprocess
import sys
from collections.abc import Sequence

import msgspec

from ftrun.cli.screen import terminal as render
from ftrun.cli.screen.text import duration, size
from ftrun.errors import FtrunError
from ftrun.wire.messages.checkpoint import ConvertReport


def convert(words: Sequence[str], *, as_json: bool) -> int:
    """Make the new checkpoint.

    Args:
        words: as `ftrun.tools.checkpoints.convert` takes them.
        as_json: what was made as one document, also where nothing was.

    Raises:
        FtrunError: the other process has died.
    """
    safe_path = ["-P"] if sys.flags.safe_path else []
    command = [sys.executable, *safe_path, "-m", "ftrun.tools.checkpoints.convert", *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    try:
        found = msgspec.json.decode(done.stdout, type=ConvertReport)
    except msgspec.MsgspecError as error:
        raise FtrunError(f"the checkpoint was not converted (exit {done.returncode})") from error
    if as_json:
        render.write_plain(msgspec.json.format(msgspec.json.encode(found), indent=1).decode())
    elif found.problem:
        sys.stderr.write(f"Error: {found.problem}\n")
    else:
        _show(found)
    return found.exit_code


def _show(found: ConvertReport) -> None:
    if found.is_linked:
        told = f"{found.source} has this layout already ({found.mesh_after}): its files are linked"
    else:
        rate = size(found.num_bytes / max(found.seconds, 1e-9))
        told = (
            f"{found.source}: {found.num_tensors} tensors of step {found.step:,}, "
            f"{found.mesh_before} -> {found.mesh_after}, {size(found.num_bytes)} in "
            f"{duration(found.seconds)}, {rate}/s"
        )
    render.write_plain(told)
    render.write_plain(f"{found.path}: a checkpoint of {found.world_size} ranks")
    for note in found.notes:
        render.write_plain(f"  {note}")
