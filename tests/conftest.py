"""Configuration of all tests: properties have no time limit, and tests pass in any order.

`--shuffle SEED` runs files, and the tests of each file, in another order, which depends on the seed
only.
"""

import random

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("ftrun", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ftrun")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", metavar="SEED", help="run files, and tests in them, in any order")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The tests of a file stay together: they share objects of the module."""
    seed = config.getoption("--shuffle")
    if seed is None:
        return
    order = random.Random(seed)
    files = list(dict.fromkeys(item.path for item in items))
    order.shuffle(files)
    order.shuffle(items)
    items.sort(key=lambda item: files.index(item.path))
