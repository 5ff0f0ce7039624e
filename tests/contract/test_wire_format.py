"""What is sent between processes and nodes stays byte for byte what was recorded.

To record it anew, after a change of the format on purpose:

    python -m tests.contract.test_wire_format
"""

import json
from pathlib import Path

import msgspec
import pytest

import ftrun.wire.cluster.messages
import ftrun.wire.messages.checkpoint
import ftrun.wire.messages.envelope
import ftrun.wire.messages.faults
import ftrun.wire.messages.smp
import ftrun.wire.messages.worker  # noqa: F401 - all modules with messages
from tests.contract.wire_samples import messages, sample

RECORDED = Path(__file__).parent / "messages.json"


def encoded() -> dict[str, str]:
    return {
        str(kind.__struct_config__.tag): msgspec.msgpack.encode(sample(kind)).hex()
        for kind in messages()
    }


def test_each_message_has_a_tag_of_its_own() -> None:
    tags = [kind.__struct_config__.tag for kind in messages()]
    assert len(set(tags)) == len(tags)


@pytest.mark.parametrize("kind", messages(), ids=lambda kind: kind.__name__)
def test_a_message_comes_back_from_its_bytes(kind: type[msgspec.Struct]) -> None:
    made = sample(kind)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=kind) == made


def test_the_bytes_are_those_that_were_recorded() -> None:
    assert encoded() == json.loads(RECORDED.read_text())


if __name__ == "__main__":
    RECORDED.write_text(json.dumps(encoded(), indent=0, sort_keys=True) + "\n")
