"""An integration whose framework is missing or too old says what to install."""

import importlib
import logging
import sys
from importlib import metadata

import pytest

from ftrun.errors import NotSupportedHere
from ftrun.integrations import libraries

MODULES = {
    "transformers": "ftrun.integrations.transformers",
    "accelerate": "ftrun.integrations.accelerate",
    "lightning": "ftrun.integrations.lightning",
    "deepspeed": "ftrun.integrations.deepspeed",
    "torchtitan": "ftrun.integrations.torchtitan",
}

each = pytest.mark.parametrize("package", MODULES)


@each
def test_a_framework_that_is_missing_is_named(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", absent)
    monkeypatch.delitem(sys.modules, MODULES[package], raising=False)
    with pytest.raises(NotSupportedHere) as error:
        importlib.import_module(MODULES[package])
    assert f"pip install 'ftrun[{package}]'" in str(error.value)


@each
def test_a_framework_that_is_too_old_is_named_with_its_version(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "0.2.1")
    monkeypatch.delitem(sys.modules, MODULES[package], raising=False)
    with pytest.raises(NotSupportedHere) as error:
        importlib.import_module(MODULES[package])
    assert "0.2.1 is installed" in str(error.value)


@pytest.mark.parametrize(
    ("found", "is_enough"), [("5.0.0rc1", True), ("10.2", True), ("4.9", False)]
)
def test_versions_are_compared_as_numbers(
    found: str, is_enough: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: found)
    if is_enough:
        libraries.require("thing", at_least="5.0")
    else:
        with pytest.raises(NotSupportedHere):
            libraries.require("thing", at_least="5.0")


def test_outside_a_run_the_first_rank_reports_that_nothing_is_done(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert not libraries.is_inside("it")
        assert len(caplog.records) == 1
        monkeypatch.setenv("RANK", "1")
        assert not libraries.is_inside("it")
    assert len(caplog.records) == 1
