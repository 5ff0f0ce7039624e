"""A status that is not fresh says so."""

from typing import Any

import pytest

from ftrun.agent.publish.status import name_age


@pytest.mark.parametrize(
    ("age_s", "verdict"),
    [
        (1.9, "running at step 5"),
        (12.3, "running at step 5; node's own figures are 12 s old, its agent is busy"),
    ],
)
def test_an_old_status_names_its_age(age_s: float, verdict: str) -> None:
    document: dict[str, Any] = {"verdict": "running at step 5", "age_s": age_s}
    name_age(document)
    assert document["verdict"] == verdict
