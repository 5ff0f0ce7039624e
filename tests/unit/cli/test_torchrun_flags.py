"""The table of torchrun's flags equals the parser of the installed torch."""

import argparse

import pytest
import torch
from torch.distributed.run import get_args_parser

from ftrun.cli.launch.torchrun_flags import TORCHRUN_FLAGS

INSTALLED = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
ACTIONS: dict[str, argparse.Action] = {
    action.dest: action
    for action in get_args_parser()._actions
    if action.option_strings and action.dest != "help"
}
EXPECTED = {flag.dest: flag for flag in TORCHRUN_FLAGS if flag.since <= INSTALLED}


def test_every_flag_of_torch_is_in_the_table_and_the_reverse() -> None:
    # --print-completion exists only if torch finds the package that generates it.
    assert set(ACTIONS) | {"print_completion"} == set(EXPECTED) | {"print_completion"}


@pytest.mark.parametrize("dest", sorted(set(ACTIONS) & set(EXPECTED)))
def test_flag_is_spelt_and_used_as_in_torch(dest: str) -> None:
    action, flag = ACTIONS[dest], EXPECTED[dest]
    assert set(action.option_strings) == set(flag.spellings)
    assert (action.nargs != 0) == flag.takes_value
    assert tuple(action.choices or ()) == flag.choices
