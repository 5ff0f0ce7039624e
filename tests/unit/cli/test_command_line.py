"""The command line is split like torch's parser does; arguments of the script stay unparsed."""

import re

import pytest
from torch.distributed.run import get_args_parser

from ftrun.cli.launch.command_line import KEY_OF_FLAG, OWN_FLAGS, parse
from ftrun.cli.launch.profiles import key_type
from ftrun.cli.launch.torchrun_flags import TORCHRUN_FLAGS
from ftrun.config.checks import choices_of
from ftrun.config.profile import Profile
from ftrun.errors import UsageError

SAME_AS_TORCH = [
    ["train.py"],
    ["--nproc-per-node", "2", "train.py"],
    ["--nproc_per_node=gpu", "train.py", "--nproc-per-node", "8"],
    ["-m", "package.module", "-m"],
    ["-r", "3", "-t3", "train.py"],
    ["-mr3", "package.module"],
    ["-r=1", "train.py"],
    ["--redirects", "0:3,1:1", "train.py", "a", "--", "b"],
    ["--standalone", "--no-python", "echo", "--hello"],
    ["--max-restarts", "-1", "train.py"],
    ["--", "train.py", "--x"],
    ["train.py", "--", "--x"],
    ["train.py", "--x", "--", "--y"],
    ["--run-path", "train.py"],
    ["--rdzv-id", "a b", "--rdzv-conf", "a=1,b=2", "train.py"],
    ["--standal", "--tee", "1", "train.py", "-q"],
    ["--run-p", "train.py"],
]


@pytest.mark.parametrize("words", SAME_AS_TORCH, ids=" ".join)
def test_torch_understands_the_same(words: list[str]) -> None:
    parser = get_args_parser()
    assert parser.parse_args(parse(words).torchrun_argv()) == parser.parse_args(words)


@pytest.mark.parametrize("words", SAME_AS_TORCH, ids=" ".join)
def test_script_is_the_one_torch_sees(words: list[str]) -> None:
    assert parse(words).script == get_args_parser().parse_args(words).training_script


def test_two_spellings_of_one_flag_are_not_ambiguous() -> None:
    # argparse before Python 3.12 refuses these; the meaning is unambiguous.
    words = parse(["--nproc", "2", "train.py"]).torchrun_argv()
    assert words == ["--nproc-per-node=2", "--", "train.py"]
    assert parse(["--mon=1", "train.py"]).torchrun_value("monitor-interval") == "1"


def test_own_flags_are_kept_apart() -> None:
    line = parse(["-q", "--snapshot-every", "5", "--preload=a", "--preload", "b", "x.py", "-q"])
    assert line.own == {"quiet": ["1"], "snapshot-every": ["5"], "preload": ["a", "b"]}
    assert line.torchrun_argv() == ["--", "x.py", "-q"]


def test_short_form_that_torchrun_knows_means_what_it_means_there() -> None:
    assert parse(["--run", "train.py"]).torchrun_value("run-path") == "1"
    assert parse(["--start-m", "fork", "train.py"]).torchrun_value("start-method") == "fork"
    assert parse(["--start", "fresh", "train.py"]).own_value("start") == "fresh"


def test_help_counts_before_the_script_only() -> None:
    assert parse(["--help"]).wants_help
    assert parse(["-q", "-h"]).wants_help
    assert not parse(["train.py", "--help"]).wants_help


def test_last_value_wins() -> None:
    line = parse(["--nnodes", "2", "--nnodes=1", "x.py"])
    assert line.torchrun_value("nnodes") == "1"
    assert line.torchrun_value("rdzv-id") is None
    assert line.own_value("grace") is None


def test_no_word_is_no_script() -> None:
    assert parse([]).script is None
    assert parse(["--standalone"]).script is None
    assert parse(["--"]).script is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--nprocs", "2", "x.py"], "--nproc-per-node"),
        (["--snapshot-evry", "2", "x.py"], "--snapshot-every"),
        (["--standalon3", "x.py"], "--standalone"),
        (["--frobnicate", "x.py"], "--frobnicate"),
        (["-x", "x.py"], "-x"),
        (["-qx", "x.py"], "-x"),
        (["--rdzv", "c10d", "x.py"], "--rdzv-backend"),
        (["--nnodes"], "--nnodes"),
        (["--nnodes", "--standalone", "x.py"], "--nnodes"),
        (["--standalone=1", "x.py"], "--standalone"),
        (["--start-method", "thread", "x.py"], "forkserver"),
        (["--start", "spawn", "x.py"], "--start-method"),
    ],
)
def test_wrong_words_are_named(words: list[str], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(words)
    assert said in str(caught.value)


def test_help_of_a_flag_agrees_with_the_key_that_it_sets() -> None:
    flags = {flag.name: flag for flag in OWN_FLAGS}
    assert KEY_OF_FLAG.keys() <= flags.keys()
    for name, text in KEY_OF_FLAG.items():
        section, _, key = text.partition(".")
        default = getattr(getattr(Profile(), section), key)
        if match := re.search(r"\(default ([^)]*)\)", flags[name].help):
            shown = f"{default:g}" if isinstance(default, float) else str(default)
            assert match[1] == shown, name
        choices = choices_of(key_type(section, key))
        assert flags[name].choices in ((), tuple(choices)), name


def test_no_own_flag_hides_one_of_torchrun() -> None:
    theirs = {spelling for flag in TORCHRUN_FLAGS for spelling in flag.spellings}
    ours = {spelling for flag in OWN_FLAGS for spelling in flag.spellings}
    assert not theirs & ours
