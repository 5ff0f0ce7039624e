"""The worker uses any accelerator in one way."""

import re
from pathlib import Path

WORKER = Path(__file__).parents[2] / "ftrun" / "worker"

ALLOWED = {
    "process/graph_captures.py": "wraps the methods of CUDA's graphs, which torch has no name for",
}


def test_cuda_is_named_only_where_torch_has_no_common_name() -> None:
    found = {
        str(path.relative_to(WORKER))
        for path in WORKER.rglob("*.py")
        if re.search(r"\btorch\.cuda\b|\bis_cuda\b", path.read_text())
    }
    assert found <= ALLOWED.keys()
    assert "process/graph_captures.py" in found
