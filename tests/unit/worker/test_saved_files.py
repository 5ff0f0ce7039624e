"""Outside of a run save and load are torch's; the content of a file is what torch writes."""

import io
import os
import time
from pathlib import Path

import pytest
import torch

import ftrun
from ftrun.config.profile import SnapshotConfig
from ftrun.errors import PeerError, PeerLost
from ftrun.wire.messages.files import SavedFileOpened
from ftrun.worker import saved_files
from tests.launch_requests import context_of, launch_request

STATE = {"weight": torch.arange(200_000.0), "step": 7, "names": ["a", "b"]}


def same(found: dict[str, object]) -> bool:
    return torch.equal(found["weight"], STATE["weight"]) and found["step"] == 7  # type: ignore


def test_outside_of_a_run_both_are_torchs(tmp_path: Path) -> None:
    path, theirs = tmp_path / "a.pt", tmp_path / "theirs" / "a.pt"
    theirs.parent.mkdir()
    ftrun.save(STATE, path)
    torch.save(STATE, theirs)
    assert path.read_bytes() == theirs.read_bytes()
    assert same(ftrun.load(path, weights_only=True))
    assert same(ftrun.load(str(path), map_location="cpu", mmap=True))
    buffer = io.BytesIO()
    ftrun.save(STATE, buffer)
    buffer.seek(0)
    assert same(ftrun.load(buffer))


@pytest.mark.parametrize("options", [{}, {"_use_new_zipfile_serialization": False}])
def test_the_content_is_that_of_torch_and_cannot_change(
    tmp_path: Path, options: dict[str, object]
) -> None:
    fd, num_bytes = saved_files._content_of(STATE, str(tmp_path / "a"), (), options)
    buffer = io.BytesIO()
    torch.save(STATE, buffer, **options)
    assert os.pread(fd, num_bytes + 1, 0) == buffer.getvalue()
    with pytest.raises(PermissionError):
        os.pwrite(fd, b"x", 0)
    assert same(torch.load(f"/proc/self/fd/{fd}", weights_only=True))
    os.close(fd)


def test_without_memory_the_content_is_on_the_storage_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 500_000
    monkeypatch.setattr(saved_files, "_CHECK_BYTES", 1)
    monkeypatch.setattr(saved_files, "_is_free", lambda num_bytes: num_bytes < limit)
    fd, num_bytes = saved_files._content_of(STATE, str(tmp_path / "a"), (), {})
    assert os.fstat(fd).st_size == num_bytes > limit
    assert same(torch.load(f"/proc/self/fd/{fd}", weights_only=True))
    assert list(tmp_path.iterdir()) == [], "it has no name"
    os.close(fd)


def test_an_object_that_cannot_be_saved_is_torchs_error_and_leaves_nothing(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(Exception, match="pickle"):
        saved_files._content_of(lambda: None, str(tmp_path / "a"), (), {})
    assert len(os.listdir("/proc/self/fd")) == before


def test_only_a_plain_file_in_a_folder_that_can_be_written_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    assert saved_files._can_be_replaced(str(tmp_path / "new"))
    assert saved_files._can_be_replaced(str(tmp_path / "file"))
    for name in ("pipe", ".", "missing/new", "file/new"):
        assert not saved_files._can_be_replaced(str(tmp_path / name))


def test_a_link_is_followed_as_by_open(tmp_path: Path) -> None:
    (tmp_path / "target").touch()
    (tmp_path / "link").symlink_to("target")
    assert saved_files._path_of(tmp_path / "link") == str(tmp_path / "target")
    assert saved_files._path_of(io.BytesIO()) is None
    assert saved_files._umask() == os.umask(saved_files._umask())


def test_without_an_smp_the_rank_writes_and_waits_only_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context, path = context_of(), tmp_path / "a.pt"
    monkeypatch.setattr(saved_files, "worker_context", lambda: context)
    monkeypatch.setattr(saved_files, "_AWAIT_S", 0.3)
    monkeypatch.setattr(saved_files, "_is_lost", False)
    waits = []
    for _ in range(2):
        began = time.monotonic()
        ftrun.save(STATE, path)
        waits.append(time.monotonic() - began)
        assert same(ftrun.load(path))
        path.unlink()
    assert waits[1] < 0.3 <= waits[0]


def test_a_run_without_snapshots_has_no_smp_to_wait_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = launch_request(snapshot=SnapshotConfig(enabled=False))
    monkeypatch.setattr(saved_files, "worker_context", lambda: context_of(request))
    ftrun.save(STATE, tmp_path / "a.pt")
    assert same(ftrun.load(tmp_path / "a.pt"))


class Link:
    """Stands for a connection to an SMP that is lost, holds one file, or holds none."""

    def __init__(self, found: tuple[SavedFileOpened, int] | None = None, *, lost: int = 0) -> None:
        self.found, self.lost = found, lost

    def save_file(self, *_: object, **__: object) -> None:
        pass

    def open_saved_file(self, path: str) -> tuple[SavedFileOpened, int] | None:
        self.lost -= 1
        if self.lost >= 0:
            raise PeerLost(peer="the SMP")
        return self.found


def test_a_load_waits_for_the_next_smp_and_returns_no_older_file_of_its_own_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a.pt"
    torch.save(STATE, path)
    link = Link(lost=2)
    monkeypatch.setattr(saved_files, "worker_context", context_of)
    monkeypatch.setattr(saved_files, "_link_of", lambda _: link)
    monkeypatch.setattr(saved_files, "_saved", set())
    monkeypatch.setattr(saved_files, "_is_lost", False)
    monkeypatch.setattr(saved_files, "_RETRY_S", 0.01)
    ftrun.save({}, path)
    assert same(ftrun.load(path)), "the next SMP does not hold it, so it is written"
    link.lost = 1 << 30
    monkeypatch.setattr(saved_files, "_AWAIT_S", 0.05)
    assert same(ftrun.load(path))
    assert "is read from the disk; a newer save may not be written" in caplog.text
    ftrun.save({}, path)
    with pytest.raises(PeerError, match="on the disk may be older"):
        ftrun.load(path)


def test_a_file_that_is_newer_than_the_waiting_save_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.pt"
    fd, num_bytes = saved_files._content_of({"step": 1}, str(path), (), {})
    monkeypatch.setattr(saved_files, "worker_context", context_of)
    for number in (time.time_ns() + (1 << 60), 1):
        link = Link((SavedFileOpened(num_bytes, number), os.dup(fd)))
        monkeypatch.setattr(saved_files, "_link_of", lambda _, link=link: link)
        torch.save(STATE, path)
        assert ftrun.load(path)["step"] == (7 if number == 1 else 1)
    os.close(fd)


def test_a_rehearsal_saves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    context = context_of(launch_request(rehearses=True))
    monkeypatch.setattr("ftrun.worker.context.worker_context", lambda: context)
    caplog.set_level("INFO")
    path = tmp_path / "a.pt"
    path.write_bytes(b"of the rank")
    for _ in range(2):
        ftrun.save(STATE, path)
    assert ftrun.is_rehearsal()
    assert path.read_bytes() == b"of the rank"
    assert caplog.text.count("is not saved: this process rehearses") == 1
    buffer = io.BytesIO()
    ftrun.save(STATE, buffer)
    buffer.seek(0)
    assert same(ftrun.load(buffer))
    context.launch = launch_request()  # it has become the rank
    assert not ftrun.is_rehearsal()
    monkeypatch.setattr(saved_files, "worker_context", lambda: None)
    ftrun.save(STATE, path)
    assert same(ftrun.load(path))
