"""ftrun: the launcher that PyTorch training runs are started with.

    cli ---- starts ----> stub -> agent --- starts ---> zygote --forks--> workers (train.py)
                                    |                                       |
                                    +--- starts ---> smp <--- arenas -------+

Four packages are processes: cli, agent, worker and smp. They never import each other; they
communicate through wire. The packages erasure, snapshot, sharding, monitor, recovery, membership
and network decide: they do no input or output. tools holds separate programs that the command line
starts; integrations and dcp hold adapters for frameworks.

In a training script:

    import ftrun
    session = ftrun.attach(model=model, optimizer=optimizer)
    for step in session.steps(1000):
        ...
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ftrun import dcp
    from ftrun.worker.context import is_rehearsal as is_rehearsal
    from ftrun.worker.process.preparation import prepared as prepared
    from ftrun.worker.saved_files import load as load
    from ftrun.worker.saved_files import save as save
    from ftrun.worker.session import Session as Session
    from ftrun.worker.session import attach as attach
    from ftrun.worker.state.providers import StateProvider as StateProvider

__version__ = "0.2.0"
__all__ = [
    "Session", "StateProvider", "__version__", "attach", "dcp", "is_rehearsal", "load", "prepared",
    "save",
]  # fmt: skip

_MODULES = {
    "attach": "ftrun.worker.session",
    "Session": "ftrun.worker.session",
    "StateProvider": "ftrun.worker.state.providers",
    "is_rehearsal": "ftrun.worker.context",
    "load": "ftrun.worker.saved_files",
    "prepared": "ftrun.worker.process.preparation",
    "save": "ftrun.worker.saved_files",
}


def __getattr__(name: str) -> object:
    # Lazy (PEP 562), because a re-export would load torch into the command line and every SMP.
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    if name == "dcp":
        return importlib.import_module("ftrun.dcp")
    raise AttributeError(f"module 'ftrun' has no attribute {name!r}")
