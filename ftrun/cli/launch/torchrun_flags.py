"""Lists every flag of torchrun 2.8 to 2.15, so that the command line needs no torch.

`tests/unit/cli/test_torchrun_flags.py` compares this table with the installed torch.

Each flag has two spellings, `--rdzv-id` and `--rdzv_id`. Most flags can also come from a variable,
such as PET_RDZV_ID. torch's own parser, which the agent runs, reads these variables.
"""

from dataclasses import dataclass

_OLDEST = (2, 8)


@dataclass(frozen=True, slots=True)
class CliFlag:
    """One flag, and the profile key that it sets; `metavar` is None if it takes no free value."""

    name: str
    help: str
    metavar: str | None = None
    short: str | None = None
    choices: tuple[str, ...] = ()
    since: tuple[int, int] = _OLDEST
    group: str = "Run"
    is_repeatable: bool = False
    key: str = ""

    @property
    def takes_value(self) -> bool:
        return self.metavar is not None or bool(self.choices)

    @property
    def spellings(self) -> tuple[str, ...]:
        """All accepted spellings; those that help shows come first."""
        long = f"--{self.name}"
        under = f"--{self.name.replace('-', '_')}"
        short = (f"-{self.short}",) if self.short else ()
        return (*short, long) if under == long else (*short, long, under)

    @property
    def dest(self) -> str:
        """The name in torchrun's namespace and, with the prefix PET_, in the environment."""
        return self.name.replace("-", "_")


_PLACE = "Place and ranks"
_MEETING = "Rendezvous"
_SCRIPT = "The script"
_LOGS = "Output of the ranks"
_WORKERS = "Starting and stopping"

# fmt: off
TORCHRUN_FLAGS: tuple[CliFlag, ...] = (
    CliFlag("nproc-per-node", "ranks to start: a number, auto, cpu, gpu or xpu", "N",
            group=_PLACE),
    CliFlag("nnodes", "nodes of the run; MIN:MAX shrinks and grows", "N|MIN:MAX", group=_PLACE),
    CliFlag("node-rank", "number of this node", "N", group=_PLACE),
    CliFlag("role", "name of the ranks' role in logs and errors", "NAME", group=_PLACE),
    CliFlag("virtual-local-rank", "every rank sees LOCAL_RANK=0 and only its own device",
            since=(2, 10), group=_PLACE),
    CliFlag("numa-binding", "bind each rank to the processors near its GPU",
            choices=("node", "socket", "exclusive", "core-complex"), since=(2, 9), group=_PLACE),
    CliFlag("standalone", "one node, with its own rendezvous on a free port", group=_MEETING),
    CliFlag("rdzv-backend", "c10d and static both mean ftrun's own; etcd: in an etcd v3 cluster",
            "NAME", group=_MEETING),
    CliFlag("rdzv-endpoint", "one or several of the nodes, where the nodes meet; or the etcd",
            "HOST[:PORT],...", group=_MEETING),
    CliFlag("rdzv-id", "name of the rendezvous; also the run id, unless --run-id", "ID",
            group=_MEETING),
    CliFlag("rdzv-conf", "more settings of the backend", "KEY=VALUE,...", group=_MEETING),
    CliFlag("master-addr", "address of node 0", "HOST", group=_MEETING),
    CliFlag("master-port", "port on node 0", "PORT", group=_MEETING),
    CliFlag("local-addr", "address under which others reach this node", "HOST", group=_MEETING),
    CliFlag("module", "the script is a module, as in python -m", short="m", group=_SCRIPT),
    CliFlag("no-python", "the script is a command: start it without python", group=_SCRIPT),
    CliFlag("run-path", "accepted; has no effect: ranks start warm, see --start",
            group=_SCRIPT),
    CliFlag("max-restarts",
            "at most this many restarts, 0 for none (default: the profile's budget)", "N",
            group=_WORKERS),
    CliFlag("monitor-interval", "accepted; ftrun detects a failure by an event", "SECONDS",
            group=_WORKERS),
    CliFlag("start-method", "accepted; has no effect: see --start",
            choices=("spawn", "fork", "forkserver"), group=_WORKERS),
    CliFlag("signals-to-handle", "accepted; has no effect: see --forward-signals",
            "SIGTERM,...", since=(2, 10), group=_WORKERS),
    CliFlag("shutdown-timeout", "accepted; has no effect: see --grace",
            "SECONDS", since=(2, 12), group=_WORKERS),
    CliFlag("event-log-handler", "name of a handler for torch's own events", "NAME",
            group=_WORKERS),
    CliFlag("log-dir", "folder for the ranks' log files", "DIR", group=_LOGS),
    CliFlag("redirects", "write to log files: 1 stdout, 2 stderr, 3 both; or 0:3,1:1 by rank",
            "STREAMS", short="r", group=_LOGS),
    CliFlag("tee", "as --redirects, and show on the terminal too", "STREAMS", short="t",
            group=_LOGS),
    CliFlag("local-ranks-filter", "show only these local ranks", "0,2,...", group=_LOGS),
    CliFlag("duplicate-stdout-filters", "copy matching lines of stdout to a separate file",
            "FILTERS", since=(2, 10), group=_LOGS),
    CliFlag("duplicate-stderr-filters", "the same for stderr", "FILTERS", since=(2, 10),
            group=_LOGS),
    CliFlag("log-line-prefix-template", "text before each line that --tee shows", "TEMPLATE",
            since=(2, 14), group=_LOGS),
    CliFlag("logs-specs", "name of a torchrun.logs_specs plug-in", "NAME", group=_LOGS),
    CliFlag("print-completion", "torchrun's completion; ftrun's own: ftrun --show-completion",
            "SHELL", since=(2, 14), group=_LOGS),
)
# fmt: on
