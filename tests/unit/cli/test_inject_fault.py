"""The list of faults describes each of them completely."""

import json

import pytest

from ftrun.cli.commands.inject_fault import list_faults, order_of
from ftrun.errors import UsageError
from ftrun.wire.fault_catalog import FAULTS, TARGETS


def test_the_list_is_grouped_and_whole(capsys: pytest.CaptureFixture[str]) -> None:
    list_faults(as_json=False)
    shown = capsys.readouterr().out
    assert [title for title in TARGETS.values() if title not in shown] == []
    assert [name for name in FAULTS if f"  {name}\n" not in shown] == []
    assert "libfaketime" in shown


def test_the_list_is_a_document_too(capsys: pytest.CaptureFixture[str]) -> None:
    list_faults(as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in found] == list(FAULTS)
    assert all(one["by"] in ("rank", "node") and one["seen"] for one in found)


def test_a_fault_must_be_named() -> None:
    nothing = {"rank": None, "node": None, "at_step": None, "lasts": None, "amount": None}
    with pytest.raises(UsageError, match="--list"):
        order_of(None, again=False, **nothing)


def test_orders_have_names_of_their_own() -> None:
    nothing = {"node": None, "at_step": None, "lasts": "2s", "amount": None, "again": False}
    first, second = (order_of("hang", rank=1, **nothing) for _ in range(2))
    assert first.id != second.id
    assert first.for_s == 2.0
