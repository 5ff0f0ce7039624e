"""Error classes of lines as torch, NCCL, the kernel and libraries write them."""

import time

import pytest

from ftrun.monitor.error_classes import CLASSES, MAX_CLASSES, MAX_LINE, ErrorClasses

LINES = {
    "Xid": "NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, GPU has fallen off the bus.",
    "ECC error": "RuntimeError: CUDA error: uncorrectable ECC error encountered",
    "device out of memory": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB",
    "out of memory": "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: not enough memory:",
    "disk full": "OSError: [Errno 28] No space left on device: '/data/cache'",
    "stale file handle": "OSError: [Errno 116] Stale file handle",
    "file system": "OSError: [Errno 5] Input/output error: '/mnt/set/0001.tar'",
    "name resolution": "socket.gaierror: [Errno -3] Temporary failure in name resolution",
    "permission": "PermissionError: [Errno 13] Permission denied: '/data'",
    "too many open files": "OSError: [Errno 24] Too many open files",
    "import error": "ModuleNotFoundError: No module named 'flash_attn'",
    "device error": "RuntimeError: CUDA error: an illegal memory access was encountered",
    "NaN": "ValueError: loss is nan at step 120",
    "collective timeout": "[rank0] Watchdog caught collective operation timeout: WorkNCCL(Seq=58)",
    "NCCL error": "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1970",
    "connection lost": "[gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer",
}
HARMLESS = [
    "step 120 loss 2.31 grad_norm 0.7 nanoseconds 12",
    "loading /data/errors/nan_report.csv",
    "INFO permissions of the cache folder are 0700",
    "saved in 3.1 s, 12 GB of memory are free",
    "",
]


def classes(*lines: str, **own: str) -> list[str]:
    return [one.error_class for one in ErrorClasses(own).find(lines, "stderr.log")]


@pytest.mark.parametrize("name", CLASSES)
def test_each_class_finds_a_real_line(name: str) -> None:
    assert classes(LINES[name])[0] == name


@pytest.mark.parametrize("line", HARMLESS)
def test_usual_lines_have_no_class(line: str) -> None:
    assert classes(line) == []


def test_causes_come_before_their_consequences_and_the_last_line_counts() -> None:
    lines = [LINES["connection lost"], LINES["disk full"], "x " + LINES["disk full"]]
    found = ErrorClasses({}).find(lines, "stderr.log")
    assert [one.error_class for one in found] == ["disk full", "connection lost"]
    assert found[0].line.startswith("x ")
    assert found[0].text.startswith("stderr.log (disk full): x OSError")


def test_classes_of_the_profile_come_first_and_replace_others() -> None:
    assert classes(LINES["disk full"], quota="No space left") == ["quota", "disk full"]
    assert classes(LINES["disk full"], **{"disk full": "quota is used"}) == []
    assert classes("my quota is used", **{"disk full": "quota is used"}) == ["disk full"]
    assert classes("my quota of 5 TB is used up", quota="quota*used ?p") == ["quota"]


def test_a_pattern_reads_only_two_wildcards() -> None:
    assert classes("E [quota] used", quota="[quota] used") == ["quota"]
    assert classes("E q used", quota="[quota] used") == []
    assert classes("E [!] used", quota="[!] used") == ["quota"]


SECRETS = [
    ("403 Forbidden: https://me:pw@ss@host/data", "403 Forbidden: https://***@host/data"),
    ("403 Forbidden: s3://b/k?X-Amz-Signature=abc&x=1 (1)", "403 Forbidden: s3://b/k?*** (1)"),
    ("Connection refused with url: /a/b?key=abc (x)", "Connection refused with url: /a/b?*** (x)"),
    ("403 Forbidden for http://h/cb#access=abc", "403 Forbidden for http://h/cb#***"),
    ("NCCL error, HF_TOKEN=abc, rank=3", "NCCL error, HF_TOKEN=***, rank=3"),
    ("NCCL error {'api_key': 'a b', 'x': 1}", "NCCL error {'api_key': ***, 'x': 1}"),
    ('NCCL error {"db-password" : "a\'b", "x": 1}', 'NCCL error {"db-password" : ***, "x": 1}'),
    ("403 Forbidden Authorization: Bearer abc.def", "403 Forbidden Authorization: ***"),
    ("NCCL error in run --client-secret abc --steps 3",
     "NCCL error in run --client-secret *** --steps 3"),
    ("\x1b[1;31mNCCL error\x1b[0m\tat\x07 x\u202ey", "NCCL error at  x y"),
    ("ImportError: no name 'Token' in x", "ImportError: no name 'Token' in x"),
    ("OSError: No space left on device: '/a?b'", "OSError: No space left on device: '/a?b'"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "shown"), SECRETS)
def test_secrets_and_control_characters_are_left_out(line: str, shown: str) -> None:
    (found,) = ErrorClasses({}).find([line], "stderr.log")
    assert found.line == shown


def test_a_secret_on_the_border_of_the_limit_is_left_out() -> None:
    start = "NCCL error " + "x" * (MAX_LINE - 11 - 12)
    (found,) = ErrorClasses({}).find([f"{start} s3://me:secretword@host/"], "stderr.log")
    assert "secret" not in found.line


def test_hiding_secrets_takes_a_moment_for_any_line() -> None:
    lines = [LINES["NCCL error"] + one * MAX_LINE for one in ("a", "token", "://@", "?a=", "--a ")]
    before_s = time.process_time()
    for line in lines:
        ErrorClasses({}).find([line], "stderr.log")
    assert time.process_time() - before_s < 2.0


def test_no_pattern_of_the_profile_can_stop_the_agent() -> None:
    """It is no regular expression: this one would take longer than the run."""
    line = "a" * MAX_LINE
    assert classes(line, x="(a+)+$", y="*a" * 20 + "*b") == []


def test_of_several_sources_the_first_line_of_a_class_counts_and_few_are_kept() -> None:
    made = ErrorClasses({})
    of_error = made.find([LINES["connection lost"]], "exception")
    of_log = made.find([LINES[name] for name in reversed(LINES)], "stderr.log")
    found = made.first([*of_error, *of_log])
    assert [one.error_class for one in found] == list(CLASSES)[:MAX_CLASSES]
    (only,) = made.first([*of_error, *made.find([LINES["connection lost"]], "stderr.log")])
    assert only.source == "exception"


def test_a_long_line_is_cut_before_it_is_examined() -> None:
    assert classes("x" * MAX_LINE + LINES["Xid"]) == []
    (found,) = ErrorClasses({}).find([LINES["Xid"] + "x" * MAX_LINE], "stdout.log")
    assert len(found.line) == MAX_LINE
