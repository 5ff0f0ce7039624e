"""The figures in README.md are those under docs/figures/, all of one run."""

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FIGURES: dict[str, Any] = runpy.run_path(str(ROOT / "scripts" / "figures.py"))
NAMES = ("example", "recovery", "costs")
MEASURED = {name: FIGURES["read"](name) for name in NAMES}
MAX_LINES = 150


def test_it_is_one_page() -> None:
    assert README.count("\n") <= MAX_LINES


def test_its_parts_are_in_order() -> None:
    assert re.findall(r"^#+ (.+)$", README, re.MULTILINE) == [
        "ftrun",
        "State",
        "Install",
        "Example",
        "A recovery",
        "What a failure costs",
        "Two commands",
        "Links",
    ]


def test_text_and_picture_are_made_from_the_measured_figures() -> None:
    assert FIGURES["filled"](README, *MEASURED.values()) == README
    assert FIGURES["picture"](MEASURED["recovery"]) == FIGURES["PICTURE"].read_text()


def test_all_figures_are_of_one_run() -> None:
    about = [found["conditions"] for found in MEASURED.values()]
    assert about[0] == about[1] == about[2]
    assert "figures.py --measure" in about[0]["command"]
    assert re.fullmatch(r"[0-9a-f]{10}", about[0]["commit"])


def test_no_other_figure_is_on_the_page() -> None:
    prose = re.sub(r"<!-- figures: .*?<!-- end -->", "", README, flags=re.DOTALL)
    units = r"(?:s|ms|us|min(?:utes)?|seconds|MB|GB|%|times)"
    assert re.findall(rf"\b\d[\d.,]* ?{units}\b", prose) == []


def test_the_example_ends_with_the_losses_of_torchrun() -> None:
    """The results are equal in every bit, with one rank killed during the run."""
    example = MEASURED["example"]
    said = [line for line in example["output"] if line.startswith("rank ")]
    assert sorted(said) == example["torchrun_output"]
    assert len(said) == 2
    assert example["script"] == FIGURES["script_of"](README).splitlines()


@pytest.mark.parametrize("one", MEASURED["costs"]["failures"], ids=lambda one: one["kind"])
def test_every_failure_of_the_table_was_judged(one: dict[str, Any]) -> None:
    assert one["is_equal"]
    assert one["trials"] >= 1


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)", README):
        assert (ROOT / target).is_file(), target
