"""A conversion reads and writes directories; URLs are refused with advice."""

from pathlib import Path

import pytest

from ftrun.tools.checkpoints.convert import convert

RULES = "mesh: {dp: 2}\nreplicate: ['*']\n"


def refusal(folder: Path, source: str, out: str) -> tuple[int, str]:
    (folder / "rules.yaml").write_text(RULES)
    found = convert([source, out, "--rules", str(folder / "rules.yaml"), "--ranks", "1"])
    return found.exit_code, found.problem


@pytest.mark.parametrize(
    ("source", "out", "reported"),
    [
        ("s3://bucket/run1", "new", "s3://bucket/run1 is a URL, and a conversion reads and writes"),
        ("s3://bucket/run1", "new", "copy the checkpoint into a directory first"),
        ("old", "gs://bucket/new", "copy the new checkpoint from a directory to it"),
        ("ftp://me:secret@host/run1", "new", "ftp://me:***@host/run1 is a URL"),
    ],
)
def test_a_url_is_refused_with_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, out: str, reported: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, problem = refusal(tmp_path, source, out)
    assert code == 2
    assert reported in problem
    assert [path.name for path in tmp_path.iterdir()] == ["rules.yaml"]


def test_a_file_url_is_the_directory_that_it_names(tmp_path: Path) -> None:
    code, problem = refusal(tmp_path, f"file://{tmp_path}/old", str(tmp_path / "new"))
    assert code == 77
    assert problem.startswith(f"{tmp_path}/old is neither a checkpoint nor a directory")
