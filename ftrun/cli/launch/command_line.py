"""Parses the words after `ftrun run` as torchrun does.

Rule 1: The first word that is neither a flag nor a flag's value is the script. The parser does not
read the words after it. A `--` before or after the script stays for torch's parser.
Rule 2: A flag may be shortened if it stays unambiguous. torchrun's flags take precedence: a short
form that torchrun accepts has the same meaning here.
"""

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ftrun.cli.launch.torchrun_flags import TORCHRUN_FLAGS, CliFlag
from ftrun.errors import UsageError

_RUN = "The run"
_SNAPSHOTS = "Snapshots in memory"
_CHECKPOINTS = "Checkpoints on disk"
_NODES = "Several nodes"
_FAILURES = "Starting, stopping, failing"

# fmt: off
OWN_FLAGS: tuple[CliFlag, ...] = (
    CliFlag("profile", "settings by name or file; see ftrun profiles", "NAME|FILE", group=_RUN),
    CliFlag("set", "one key of the profile", "SECTION.KEY=VALUE", group=_RUN, is_repeatable=True),
    CliFlag("run-id", "name of the run (default: --rdzv-id, else a new one)", "ID", group=_RUN),
    CliFlag("quiet", "write only what needs attention", short="q", group=_RUN),
    CliFlag("debug", "write everything, including tracebacks of ftrun itself", group=_RUN),
    CliFlag("metrics-port", "serve metrics for Prometheus there", "PORT", group=_RUN,
            key="metrics.port"),
    CliFlag("snapshot-every", "steps between two, or auto: by their cost", "auto|N",
            group=_SNAPSHOTS, key="snapshot.every"),
    CliFlag("snapshot-required", "stop if there is not enough memory for them", group=_SNAPSHOTS,
            key="snapshot.required"),
    CliFlag("no-snapshots", "disable snapshots", group=_SNAPSHOTS, key="snapshot.enabled"),
    CliFlag("orphan-timeout", "seconds that snapshots stay in memory after the launcher ended",
            "SECONDS", group=_SNAPSHOTS, key="smp.orphan_timeout_s"),
    CliFlag("checkpoint-dir", "directory or URL for checkpoints", "DIR", group=_CHECKPOINTS,
            key="checkpoint.directory"),
    CliFlag("resume", "from the newest there (auto), from the beginning (never), from this one",
            "auto|never|PATH", group=_CHECKPOINTS, key="checkpoint.resume"),
    CliFlag("checkpoint-every", "time between two (default 600), or steps, such as 1step",
            "SECONDS|Nstep", group=_CHECKPOINTS, key="checkpoint.every_s"),
    CliFlag("checkpoint-keep", "number of checkpoints to keep (default 2)", "N",
            group=_CHECKPOINTS, key="checkpoint.keep"),
    CliFlag("checkpoint-keep-bytes", "remove the oldest while all have more bytes (default 0)",
            "BYTES", group=_CHECKPOINTS, key="checkpoint.keep_bytes"),
    CliFlag("spares", "warm standby nodes in addition to --nnodes", "S", group=_NODES),
    CliFlag("erasure", "snapshots survive the loss of any M of K+M nodes; mirror: copies on the "
            "next node (default auto)",
            "K+M|mirror|none", group=_NODES, key="erasure.scheme"),
    CliFlag("node-id", "name of this node (default: the machine's)", "NAME", group=_NODES),
    CliFlag("bind", "address of this node that the others reach", "ADDRESS", group=_NODES),
    CliFlag("secret-file", "the run's secret; the same on each node", "FILE", group=_NODES,
            key="security.secret_file"),
    CliFlag("fault-domain", "what fails together with this node, such as a rack", "NAME",
            group=_NODES),
    CliFlag("network-plan",
            "use the best rails and order of nodes (on), or only report them (default report)",
            "off|report|on", group=_NODES, key="network.plan"),
    CliFlag("topology", "which nodes share a switch: YAML or topology.conf", "FILE", group=_NODES,
            key="network.topology"),
    CliFlag("notices", "drain this node at a notice of aws, google, azure, kubernetes, slurm, "
            "file:PATH or command:COMMAND", "SOURCE", group=_NODES, key="notices.sources",
            is_repeatable=True),
    CliFlag("pause-timeout", "longest wait with too few nodes (default 900)", "SECONDS",
            group=_NODES, key="nodes.pause_timeout_s"),
    CliFlag("start", "ranks forked from a process that has torch, or new processes",
            choices=("warm", "fresh"), group=_FAILURES, key="start.mode"),
    CliFlag("preload", "import it once, before the ranks are forked", "MODULE", group=_FAILURES,
            key="start.preload", is_repeatable=True),
    CliFlag("prepare", "call it before a restart; the script gets the result by ftrun.prepared",
            "MODULE:FUNCTION", group=_FAILURES, key="start.prepare", is_repeatable=True),
    CliFlag("survivors", "ranks in session.guard() keep their processes when another rank fails",
            choices=("off", "on"), group=_FAILURES, key="restart.survivors"),
    CliFlag("rehearse", "standbys that have set up as a rank, for the ranks of a node (default 0)",
            "N|all", group=_FAILURES, key="restart.rehearse"),
    CliFlag("grace", "from the first SIGTERM to SIGKILL (default 30)", "SECONDS", group=_FAILURES,
            key="stop.grace_s"),
    CliFlag("allow-faults", "ftrun inject-fault may break this run", group=_FAILURES),
    CliFlag("allow-network-faults", "the same, and cut this node's network", group=_FAILURES),
    CliFlag("forward-signals", "pass these to the ranks instead of handling them", "USR1,...",
            group=_FAILURES, key="stop.forward_signals"),
)
# fmt: on

KEY_OF_FLAG = {flag.name: flag.key for flag in OWN_FLAGS if flag.key}  # in the profile
_SURE_LETTERS = len("--nproc")
_NEGATIVE_NUMBER = re.compile(r"-\d+|-\d*\.\d+")


def _by_spelling(flags: Sequence[CliFlag]) -> dict[str, CliFlag]:
    return {spelling: flag for flag in flags for spelling in flag.spellings}


_TORCHRUN = _by_spelling(TORCHRUN_FLAGS)
_OWN = _by_spelling(OWN_FLAGS)
_ALL = _TORCHRUN | _OWN


@dataclass(slots=True)
class CommandLine:
    """The parsed words. Values are text; "1" marks a flag without a value."""

    torchrun: list[tuple[CliFlag, str | None]] = field(default_factory=list)
    own: dict[str, list[str]] = field(default_factory=dict)
    tail: list[str] = field(default_factory=list)
    """The script and all words after it; includes a `--` before the script."""

    wants_help: bool = False

    @property
    def script(self) -> str | None:
        rest = self.tail[1:] if self.tail[:1] == ["--"] else self.tail
        return rest[0] if rest else None

    def torchrun_value(self, name: str) -> str | None:
        """Returns the last value of a torchrun flag; "1" if the flag takes no value."""
        given = [value for flag, value in self.torchrun if flag.name == name]
        return ("1" if given[-1] is None else given[-1]) if given else None

    def own_value(self, name: str) -> str | None:
        given = self.own.get(name)
        return given[-1] if given else None

    def torchrun_argv(self) -> list[str]:
        """Returns the arguments for torch's parser, with flags in full spelling.

        The `--` prevents that parser from matching short forms of its flags after the script. A
        `--` that the operator typed has the same effect and stays at its position.
        """
        flags = [
            f"--{flag.name}" if value is None else f"--{flag.name}={value}"
            for flag, value in self.torchrun
        ]
        return [*flags, *([] if "--" in self.tail else ["--"]), *self.tail]


def parse(words: Sequence[str], *, more: Sequence[CliFlag] = ()) -> CommandLine:
    """Parses the words after `ftrun run`, with `more` flags of a command that accepts these too."""
    found = CommandLine()
    of_command = _by_spelling(more)
    rest = list(words)
    while rest:
        word = rest[0]
        if word == "--" or not word.startswith("-") or word == "-":
            found.tail = rest
            break
        rest.pop(0)
        if word in ("-h", "--help"):
            found.wants_help = True
        elif word.startswith("--"):
            _take_long(found, word, rest, of_command)
        else:
            _take_short(found, word, rest, of_command)
    return found


def _take_long(
    found: CommandLine, word: str, rest: list[str], of_command: Mapping[str, CliFlag]
) -> None:
    name, equals, text = word.partition("=")
    flag = of_command.get(name) or _named(name, of_command)
    if equals and not flag.takes_value:
        raise UsageError(f"{name} takes no value, and {text!r} was given")
    value = _next_value(name, flag, rest) if flag.takes_value and not equals else None
    _add(found, flag, text if equals else value)


def _take_short(
    found: CommandLine, word: str, rest: list[str], of_command: Mapping[str, CliFlag]
) -> None:
    """Parses `-r 3`, `-r3`, `-r=3`, and several flags without a value in one word: `-qm`."""
    letters = word[1:]
    while letters:
        name, letters = f"-{letters[0]}", letters[1:]
        flag = _ALL.get(name)
        if flag is None:
            raise UsageError(_unknown(word if name == word[:2] else name, of_command))
        if flag.takes_value:
            value = letters.removeprefix("=") if letters else _next_value(name, flag, rest)
            _add(found, flag, value)
            return
        _add(found, flag, None)


def _next_value(name: str, flag: CliFlag, rest: list[str]) -> str:
    is_flag = rest and rest[0].startswith("-") and not _NEGATIVE_NUMBER.fullmatch(rest[0])
    if not rest or (is_flag and " " not in rest[0] and rest[0] != "-"):
        wanted = flag.metavar or "|".join(flag.choices)
        raise UsageError(f"{name} needs a value: {name} {wanted}")
    return rest.pop(0)


def _add(found: CommandLine, flag: CliFlag, value: str | None) -> None:
    if value is not None and flag.choices and value not in flag.choices:
        message = f"--{flag.name} is one of {', '.join(flag.choices)}, not {value!r}"
        if flag.name == "start" and value in ("spawn", "fork", "forkserver"):
            message += "; torchrun's flag of that kind is --start-method"
        raise UsageError(message)
    if flag in TORCHRUN_FLAGS:
        found.torchrun.append((flag, value))
    else:
        found.own.setdefault(flag.name, []).append("1" if value is None else value)


def _named(name: str, of_command: Mapping[str, CliFlag]) -> CliFlag:
    if name in _ALL:
        return _ALL[name]
    for table in (_TORCHRUN, _OWN):
        matches = {flag.name: flag for text, flag in table.items() if text.startswith(name)}
        if len(matches) == 1:
            return next(iter(matches.values()))
        if matches:
            raise UsageError(f"{name} could be any of {', '.join(f'--{m}' for m in matches)}")
    raise UsageError(_unknown(name, of_command))


def _unknown(name: str, of_command: Mapping[str, CliFlag]) -> str:
    long = [f"--{flag.name}" for flag in (*of_command.values(), *TORCHRUN_FLAGS, *OWN_FLAGS)]
    # A typo is rarely in the first letters: `--nprocs` is closer to --nproc-per-node than to
    # --nnodes, whatever the number of different letters.
    near = [s for s in long if len(name) > _SURE_LETTERS and s.startswith(name[:_SURE_LETTERS])]
    near = difflib.get_close_matches(name, near or long, n=1, cutoff=0.0 if near else 0.5)
    hint = f" Did you mean {near[0]}?" if near else ""
    return f"{name} is not a flag of ftrun or torchrun.{hint} ftrun --help lists them all"
