"""Fresh start of a worker: a new process, without the zygote.

Runs in:  worker: `python -u -m ftrun.worker.process.fresh script|module|command ...`.
Takes in: the user's program.
Gives:    the same heartbeats and error files as a warm start.

The script itself imports torch, so variables that it sets before that import take effect. The
heartbeat hook is installed at the end of that import.
"""

import importlib.abc
import importlib.util
import os
import signal
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from ftrun.linux import (
    die_with_parent,
    ignore_user_signals,
    let_parent_trace,
    name_process,
    offer_to_oom_killer,
)
from ftrun.wire.messages.worker import decode_launch
from ftrun.wire.run_environment import LAUNCH
from ftrun.worker.process import heartbeat
from ftrun.worker.process import startup as standby


class _AfterTorch(importlib.abc.MetaPathFinder):
    """Installs the heartbeat at the end of `import torch`."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _InstallingLoader(spec.loader)
        return spec


class _InstallingLoader(importlib.abc.Loader):
    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        heartbeat.install(started_with=dict(os.environ))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def main() -> None:
    kind, argv = sys.argv[1], sys.argv[2:]
    offer_to_oom_killer()
    request = decode_launch(os.environ[LAUNCH])
    die_with_parent(request.agent_pid)
    let_parent_trace()
    if kind == "command":
        os.execvp(argv[0], argv)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    ignore_user_signals()
    name_process(f"ftrun-rank{request.rank}")
    sys.meta_path.insert(0, _AfterTorch())
    standby.run_script(argv, is_module=kind == "module")


if __name__ == "__main__":
    main()
