"""The documentation names what exists: modules, tests, keys, codes, variables, crash points."""

import ast
import json
import re
from pathlib import Path

import msgspec
import pytest

from ftrun.cli.launch.command_line import KEY_OF_FLAG, OWN_FLAGS
from ftrun.cli.launch.profiles import key_type
from ftrun.config.checks import allowed, description_of
from ftrun.config.profile import Profile
from ftrun.errors import ExitCode
from ftrun.monitor.verdicts import VerdictKind
from ftrun.records.decode import kinds
from ftrun.wire import run_environment

ROOT = Path(__file__).parents[2]
DOCS = {path.name: path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))}
PACKAGE = {path: path.read_text() for path in sorted((ROOT / "ftrun").rglob("*.py"))}
MAX_LINE = 120
PAGES = """
architecture benchmarks checkpoints dcp drills estimate failure-modes field
frameworks getting-started glossary gpu internals layouts many-nodes network
operations papers security slurm-kubernetes survivors verdicts
"""

each_page = pytest.mark.parametrize("name", DOCS)


def rows(text: str) -> list[list[str]]:
    """The cells of every table row, without headings and rulers."""
    found = []
    lines = text.splitlines()
    for line, below in zip(lines, [*lines[1:], ""], strict=True):
        if line.startswith("|") and not line.startswith("| ---") and not below.startswith("| ---"):
            found.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
    return found


def words(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_every_page_is_there() -> None:
    assert set(DOCS) == {f"{name}.md" for name in PAGES.split()}


@each_page
def test_lines_fit(name: str) -> None:
    prose = re.sub(r"^```.*?^```", "", DOCS[name], flags=re.MULTILINE | re.DOTALL)
    long = [line for line in prose.splitlines() if len(line) > MAX_LINE]
    assert [line for line in long if not line.startswith("|")] == []


@pytest.mark.parametrize("name", [*DOCS, "../README.md", "../CONTRIBUTING.md"])
def test_files_that_are_named_exist(name: str) -> None:
    text = (ROOT / "docs" / name).read_text()
    named = re.findall(r"`((?:docs|ftrun|profiles|scripts|tests)/[\w./-]+)", text)
    assert [path for path in named if not (ROOT / path).exists()] == []


@each_page
def test_tests_that_are_named_exist(name: str) -> None:
    assert re.findall(r"\btests\.\w[\w.:]*", DOCS[name]) == [], "write tests/folder/test_module.py"
    for path, test in re.findall(r"(tests/[\w/]+\.py)::(\w+)", DOCS[name]):
        assert f"def {test}(" in (ROOT / path).read_text(), f"{path} has no {test}"


@each_page
def test_links_lead_somewhere(name: str) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", DOCS[name]):
        page, _, anchor = target.partition("#")
        if page.endswith(".svg"):
            assert (ROOT / "docs" / page).is_file(), page
            continue
        text = DOCS[f"{page.removesuffix('.md')}.md" if page else name]
        titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
        anchors = {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}
        assert not anchor or anchor in anchors, target


def test_every_folder_is_in_the_picture() -> None:
    folders = {path.name for path in (ROOT / "ftrun").iterdir() if (path / "__init__.py").exists()}
    assert [name for name in folders if f"`ftrun/{name}/`" not in DOCS["architecture.md"]] == []


def test_floors_are_those_that_are_checked() -> None:
    _, _, behind = (ROOT / "pyproject.toml").read_text().partition("\nlayers = [\n")
    floors = re.findall(r'"([^"]+)"', behind.partition("\n]")[0])
    assert floors
    for floor in floors:
        assert f"\n  {floor}\n" in DOCS["architecture.md"], floor


def test_a_failure_has_a_row_of_six_cells_and_a_test_or_a_dash() -> None:
    before, _, _ = DOCS["failure-modes.md"].partition("## Crash points")
    for cells in rows(before):
        assert len(cells) == 6, cells
        assert all(cells), cells
        assert cells[5] == "-" or all("::test_" in word for word in words(cells[5])), cells


def test_a_feature_of_a_paper_names_its_module_and_its_test_if_it_works() -> None:
    found = [cells for cells in rows(DOCS["papers.md"]) if cells[0].isdigit()]
    assert len(found) == 77
    for number, feature, modules, tests, state in found:
        where = f"{number} {feature}"
        assert re.match(r"works|partial: |not built|not claimed|not on CPU: ", state), where
        if state.startswith("works"):
            assert words(modules), where
            assert words(tests), where
        assert all(word.startswith("ftrun/") for word in words(modules)), where
        assert all("::test_" in word for word in words(tests)), where


def test_crash_points_are_those_of_the_code() -> None:
    _, _, section = DOCS["failure-modes.md"].partition("## Crash points")
    reported: set[str] = set()
    for cells in rows(section):
        first, *others = words(cells[0])
        reported |= {first, *(first.rpartition(".")[0] + other for other in others)}
    passed = {n for text in PACKAGE.values() for n in re.findall(r'crash_point\("([^"]+)"', text)}
    assert reported == passed


@pytest.mark.parametrize("kind", VerdictKind, ids=lambda kind: kind.value)
def test_every_verdict_has_a_section_that_reports_what_to_do(kind: VerdictKind) -> None:
    title = f"{kind.value[0].upper()}{kind.value[1:]}"
    _, found, rest = DOCS["verdicts.md"].partition(f"\n## {title}\n")
    assert found, f"docs/verdicts.md has no section {title}"
    section, _, _ = rest.partition("\n## ")
    parts = re.findall(r"^\*\*(.+?)\.\*\*", section, re.MULTILINE)
    assert parts == [
        "What it means",
        "How ftrun detects it",
        "What ftrun did",
        "What you should do",
        "What it looks like",
        "What may be mistaken for it",
    ]


def test_every_exit_code_is_explained() -> None:
    reported = {(cells[0], cells[1]) for cells in rows(DOCS["operations.md"]) if cells[0].isdigit()}
    assert reported == {(str(int(code)), code.name) for code in ExitCode}


def rows_of_settings() -> list[str]:
    """The table of operations.md is generated from the definition of the settings."""
    found = []
    for section, about in msgspec.to_builtins(Profile()).items():
        for key, default in about.items():
            shown = json.dumps(default) if isinstance(default, bool | None) else str(default)
            kind = key_type(section, key)
            cells = (f"`{section}.{key}`", f"`{shown}`", allowed(kind), description_of(kind))
            found.append(f"| {' | '.join(cells)} |")
    return found


def test_the_table_of_settings_is_made_from_their_definition() -> None:
    _, _, rest = DOCS["operations.md"].partition("| key | default | value | meaning |\n")
    table, _, _ = rest.partition("\n\n")
    assert table.splitlines()[1:] == rows_of_settings()


def test_every_variable_is_there() -> None:
    names = {n for text in PACKAGE.values() for n in re.findall(r'"(FTRUN_[A-Z_]+)"', text)}
    values = vars(run_environment).items()
    names |= {value for key, value in values if key.isupper() and isinstance(value, str)}
    assert {name for name in names if f"`{name}`" not in DOCS["operations.md"]} == set()


def test_every_flag_of_its_own_is_there() -> None:
    reported = DOCS["operations.md"]
    assert [f.name for f in OWN_FLAGS if not re.search(rf"`--{f.name}[` ]", reported)] == []
    keys = {word.split()[0][2:]: words(c[2]) for c in rows(reported) if len(c) == 4
            for word in words(c[1]) if word.startswith("--")}  # fmt: skip
    assert {name: keys[name] for name in KEY_OF_FLAG} == {n: [k] for n, k in KEY_OF_FLAG.items()}


def test_every_kind_of_journal_line_is_there() -> None:
    assert {kind for kind in kinds() if f"`{kind}`" not in DOCS["operations.md"]} == set()


def test_every_field_of_the_status_document_is_there() -> None:
    _, _, rest = DOCS["operations.md"].partition("\n## Status")
    section, _, _ = rest.partition("\n## ")
    tree = ast.parse((ROOT / "ftrun/wire/messages/status.py").read_text())
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    views = [node for node in classes if node.name != "SmpStatus"]
    fields = [line for node in views for line in node.body if isinstance(line, ast.AnnAssign)]
    keys = {line.target.id for line in fields if isinstance(line.target, ast.Name)}
    assert {key for key in keys if not re.search(rf"[`.]{key}[`\[.]", section)} == set()
