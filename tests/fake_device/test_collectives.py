"""Collectives on the fake device give the bytes that gloo gives on the processor."""

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.integration.conftest import free_port

SCRIPT = Path(__file__).parent / "scripts" / "sharded_training.py"
LIMIT_S = 200

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compiled")]


@pytest.mark.parametrize("mode", ["lazy", pytest.param("threads", marks=pytest.mark.full)])
def test_ddp_and_fsdp2_train_as_on_the_processor(tmp_path: Path, mode: str) -> None:
    results = [tmp_path / str(rank) for rank in range(2)]
    variables = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
        "FAKE_DEVICE_MODE": mode,
    }
    with ExitStack() as ends:
        ranks = []
        for rank, result in enumerate(results):
            process = subprocess.Popen(
                [sys.executable, str(SCRIPT), str(result)],
                env=os.environ | variables | {"RANK": str(rank)},
            )
            ends.callback(process.wait)
            ends.callback(process.kill)
            ranks.append(process)
        assert [process.wait(LIMIT_S) for process in ranks] == [0, 0]
    for result in results:
        assert json.loads(result.read_text()) == {"ddp": True, "fsdp": True}
