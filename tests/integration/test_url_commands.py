"""The output of the command line for a URL, before a run starts and while none runs."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ftrun.cli.launch import checkpoint_check as url_check
from ftrun.cli.launch.checkpoint_check import check_there, check_writable
from ftrun.errors import UsageError
from tests.contract.answering import closed_port
from tests.ftp_server import FtpServer, ftp_server, url_of
from tests.integration.test_checkpoint_files import LAYOUT, Arenas, arenas
from tests.integration.test_checkpoint_url import newest, write, writer
from tests.integration.test_checkpoints_command import ftrun

__all__ = ["arenas"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def server(root: Path) -> Iterator[FtpServer]:
    with ftp_server(root) as found:
        yield found


@pytest.fixture
def full(server: FtpServer, arenas: Arenas) -> FtpServer:
    """A store with three checkpoints."""
    by = writer()
    for step in (1, 2, 3):
        arenas.seal(step)
        write(arenas, server.url(), by)
    return server


def test_a_url_that_can_be_written_is_left_as_it_was(server: FtpServer, root: Path) -> None:
    check_writable(server.url("new/folder"))
    assert list((root / "new" / "folder").iterdir()) == []


def test_a_url_that_cannot_be_written_is_refused_in_words(root: Path) -> None:
    with ftp_server(root, may_write=False) as server:
        with pytest.raises(UsageError, match=r"--checkpoint-dir ftp://me:\*\*\*@.*550"):
            check_writable(server.url())
        with pytest.raises(UsageError, match="530"):
            check_writable(server.url().replace("s3cret", "other"))
    reported = "ftrun tried to write a small file there"
    with ftp_server(root, quota_bytes=0) as server, pytest.raises(UsageError, match=reported):
        check_writable(server.url())
    with closed_port("127.0.0.1") as port:
        for url, reported in (
            (url_of("127.0.0.1", port), "Connection refused"),
            ("nope://bucket/run", "nope"),
            (f"https://127.0.0.1:{port}/run", "--checkpoint-dir https"),
        ):
            with pytest.raises(UsageError, match=reported) as refused:
                check_writable(url)
            assert "nothing was started" in str(refused.value)
            assert "s3cret" not in str(refused.value)


def test_a_library_that_is_missing_is_named() -> None:
    if importlib.util.find_spec("s3fs") is None:
        with pytest.raises(UsageError, match="Install s3fs"):
            check_writable("s3://bucket/run")
    code = (
        "import sys; sys.modules['fsspec'] = None\n"
        "sys.argv = ['catalog', 'try', 'ftp://somewhere/run']\n"
        "from ftrun.tools.checkpoints.catalog import main\nmain()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=60)
    assert "pip install 'ftrun[url]'" in json.loads(done.stdout)["problem"]


def test_a_url_that_hangs_is_not_waited_for(
    server: FtpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(url_check, "LIMIT_S", 1.0)
    server.freeze()
    with pytest.raises(UsageError, match="did not answer within 1 s"):
        check_writable(server.url())
    server.thaw()


def test_what_is_to_be_resumed_is_looked_for(full: FtpServer, root: Path) -> None:
    name = newest(root).name
    for there in ("run/", "run/latest", f"run/{name}"):
        check_there(full.url(there))
    for missing in ("", "run/step-00000009-g0-00000000-00000000", "elsewhere/latest"):
        with pytest.raises(UsageError, match="there is no checkpoint"):
            check_there(full.url(missing))


def test_snapshots_lists_verifies_and_prunes(full: FtpServer, root: Path) -> None:
    url = full.url()
    found = json.loads(ftrun("list", url, "--json"))
    assert [one["step"] for one in found["checkpoints"]] == [3, 2, 1]
    assert [one["is_latest"] for one in found["checkpoints"]] == [True, False, False]
    sizes = [path.stat().st_size for path in newest(root).glob("rank-*")]
    assert {one["num_bytes"] for one in found["checkpoints"]} == {sum(sizes)}
    assert "s3cret" not in json.dumps(found)
    assert "DAMAGED" not in ftrun("verify", url)
    path = newest(root) / "rank-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[LAYOUT.image_bytes // 2] ^= 1
    path.write_bytes(data)
    reported = ftrun("verify", url, "latest", code=1)
    assert f"DAMAGED  {newest(root).name}: {path.name}: piece" in reported
    assert "weight" in reported
    (newest(root) / "rank-00001.digests").unlink()
    assert "rank-00001" in ftrun("list", url, code=1)
    whole = next(one["name"] for one in found["checkpoints"] if one["step"] == 2)
    assert "1 would be removed" in ftrun("prune", url, "--keep", "1", "--dry-run", code=1)
    assert len(list(root.glob("run/*/index.json"))) == 3
    assert "1 removed, 2 left" in ftrun("prune", url, "--keep", "1", code=1)
    left = {index.parent.name for index in root.glob("run/*/index.json")}
    assert left == {newest(root).name, whole}
    assert "there is no checkpoint other" in ftrun("verify", url, "other", code=1)
