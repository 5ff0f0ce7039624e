"""Messages between processes and nodes stay byte for byte as recorded.

To record them again after an intended change of the format: python -m
tests.contract.test_wire_format
"""

import json
from pathlib import Path

import msgspec
import pytest

import ftrun.wire.cluster.messages
import ftrun.wire.messages.checkpoint
import ftrun.wire.messages.envelope
import ftrun.wire.messages.faults
import ftrun.wire.messages.files
import ftrun.wire.messages.smp
import ftrun.wire.messages.worker  # noqa: F401 - all modules with messages
from ftrun.wire.messages.status import StatusView
from tests.contract.wire_samples import messages, sample

RECORDED = Path(__file__).parent / "messages.json"
STATUS = Path(__file__).parent / "status.json"


def encoded() -> dict[str, str]:
    return {
        str(kind.__struct_config__.tag): msgspec.msgpack.encode(sample(kind)).hex()
        for kind in messages()
    }


def test_the_tag_of_each_message_is_the_name_of_its_class() -> None:
    tags = [kind.__struct_config__.tag for kind in messages()]
    assert tags == [kind.__name__ for kind in messages()]
    assert len(set(tags)) == len(tags)


@pytest.mark.parametrize("kind", messages(), ids=lambda kind: kind.__name__)
def test_a_message_comes_back_from_its_bytes(kind: type[msgspec.Struct]) -> None:
    made = sample(kind)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=kind) == made


def test_the_bytes_are_those_that_were_recorded() -> None:
    assert encoded() == json.loads(RECORDED.read_text())


def encoded_status() -> str:
    """The status document with a value in every field, as `ftrun status --json` prints it."""
    return msgspec.json.format(msgspec.json.encode(sample(StatusView)), indent=1).decode() + "\n"


def test_the_status_document_has_the_fields_that_were_recorded() -> None:
    recorded = STATUS.read_text()
    assert encoded_status() == recorded
    assert msgspec.json.decode(recorded, type=StatusView) == sample(StatusView)


if __name__ == "__main__":
    STATUS.write_text(encoded_status())
    RECORDED.write_text(json.dumps(encoded(), indent=0, sort_keys=True) + "\n")
