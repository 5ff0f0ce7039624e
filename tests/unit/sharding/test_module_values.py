"""Values of modules of several ranks, put together by the names that each rank holds."""

import json
import os
import subprocess
import sys

from ftrun.sharding.module_values import merged, modules_with


def test_a_module_contains_the_tensors_below_it() -> None:
    names = ["blocks.0.linear.weight", "blocks.0.linear.bias", "head.weight", "scale"]
    assert modules_with(names) == {"blocks", "blocks.0", "blocks.0.linear", "head"}


def test_the_first_rank_that_holds_a_name_decides() -> None:
    first = ({"a": 1}, {"a", "b"})
    second = ({"a": 2, "b": 3, "c": 4}, {"a", "b", "c"})
    assert merged([first, second]) == {"a": 1, "c": 4}


def test_the_order_of_names_does_not_depend_on_the_hash_seed() -> None:
    code = """
import json
from ftrun.sharding.module_values import gradients_merged, parameters_of
names = [f"model.l{at}.w" for at in range(9)]
part = {"usual": True, "except": names[::2]}
parameters = parameters_of({"optimizer": [{"params": names}]})
print(json.dumps(gradients_merged([(part, parameters)], [])["except"]))
"""
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        found = subprocess.check_output([sys.executable, "-c", code], env=environment)
        assert json.loads(found) == [f"model.l{at}.w" for at in range(0, 9, 2)]
