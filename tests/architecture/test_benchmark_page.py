"""`scripts/test` replaces the table of each benchmark, and leaves the other tables unchanged."""

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "test"))
PAGE = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")


def written(page: str, name: str, output: str) -> str:
    found = SCRIPT["with_block"](page, name, output)
    assert isinstance(found, str)
    return found


def titles(page: str) -> list[str]:
    return [line for line in page.splitlines() if line.startswith("## ")]


def test_a_table_takes_the_place_of_the_one_before() -> None:
    page = written(PAGE, "bench_steps", "a new table\n")
    assert titles(page) == titles(PAGE)
    assert "## scripts/bench_steps.py\n\n```\na new table\n```\n\n## " in page
    assert written(page, "bench_steps", "another one") == page.replace("a new table", "another one")


def test_a_table_that_is_new_comes_where_the_list_has_it() -> None:
    page = "# Benchmarks\n\nWords.\n\n## scripts/bench_dcp.py\n\n```\nlast\n```\n"
    page = written(written(page, "bench_monitor", "middle"), "bench_recovery", "first")
    wanted = ["bench_recovery", "bench_monitor", "bench_dcp"]
    assert titles(page) == [f"## scripts/{name}.py" for name in wanted]
    assert page.startswith("# Benchmarks\n\nWords.\n\n## ")
    assert page.endswith("```\nlast\n```\n")
