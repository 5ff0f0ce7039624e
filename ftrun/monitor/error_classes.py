"""Finds the class of an error in the lines that a rank wrote.

Source:   TRANSOM (arXiv 2310.10046) joins log classes, exit codes and host metrics in one verdict.

Rule 1: a class is evidence. No verdict, action or count of causes depends on it, because a script
        may print any text.
Rule 2: classes are in the order of causes before consequences: a full disk before the exception
        that reports it, that before the connections which other ranks lose. The first class that
        fits is the class of the failure.
Rule 3: the last line of a class is shown, because earlier ones may be warnings.
Rule 4: patterns of the profile are wildcards. A regular expression may take hours for one line, and
        the agent would stop with it.
Rule 5: lines leave the node, in the journal and by hooks. What looks like a secret is left out.
"""

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence

from ftrun.events import ErrorLine

MAX_LINE = 400
"""Characters of a line that are examined and shown."""
MAX_CLASSES = 3

CLASSES: Mapping[str, str] = {
    "Xid": r"\bXid\b.{0,60}\d|fallen off the bus",
    "ECC error": r"(?i:uncorrectable ecc|double.bit ecc|ecc error)|cudaErrorECCUncorrectable",
    "device out of memory": r"(?:CUDA|HIP|XPU|MPS).{0,30}out of memory|cudaErrorMemoryAllocation"
    r"|CUBLAS_STATUS_ALLOC_FAILED",
    "out of memory": r"\bMemoryError\b|Cannot allocate memory|std::bad_alloc|not enough memory"
    r"|Out of memory: Killed|\bENOMEM\b",
    "disk full": r"No space left on device|Disk quota exceeded|\bENOSPC\b|\bEDQUOT\b",
    "stale file handle": r"(?i:stale (?:nfs )?file handle)|\bESTALE\b",
    "file system": r"Input/output error|Read-only file system|Remote I/O error"
    r"|Transport endpoint is not connected|nfs: server .{0,80}not responding",
    "name resolution": r"Temporary failure in name resolution|Name or service not known"
    r"|No address associated with hostname|(?i:could not resolve host)|\bgaierror\b",
    "permission": r"Permission denied|Operation not permitted|\bAccessDenied\b|403 Forbidden",
    "too many open files": r"Too many open files|\bEMFILE\b",
    "import error": r"\bModuleNotFoundError\b|\bImportError\b|cannot open shared object file"
    r"|undefined symbol",
    "device error": r"CUDA error|\bcudaError[A-Z]|device-side assert|illegal memory access"
    r"|CUBLAS_STATUS_|CUDNN_STATUS_",
    "NaN": r"(?i:\b(?:loss|grad\w*|norm|logits?|param\w*)\b.{0,40}\b(?:nan|inf)\b)"
    r"|returned nan values|FloatingPointError",
    "collective timeout": r"collective operation timeout|Timed out waiting \d+ ?ms for"
    r"|Watchdog caught|ncclTimeout",
    "NCCL error": r"NCCL error|\bnccl\w*Error\b|NCCL WARN|DistBackendError",
    "connection lost": r"Connection (?:reset|closed|refused)|Broken pipe|DistNetworkError",
}
"""Regular expressions by class, searched in each line."""

_NAME = (
    r"[\w.-]{0,40}(?:token|secret|passw(?:or)?d|passphrase|api[_-]?key|access[_-]?key|"
    r"private[_-]?key|credential|authorization)[\w.-]{0,40}"
)
_VALUE = r"\"[^\"]*(?:\"|$)|'[^']*(?:'|$)|(?:(?:bearer|basic|token)\s+)?[^\s,;&\"'(){}\[\]]+"
_SECRETS = (
    (re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]"), ""),
    (re.compile(r"://[^\s/]*@"), "://***@"),
    (re.compile(r"(://[^\s?#\"'<>]*[?#]|\?(?=[\w.%-]+=))[^\s\"'<>]+"), r"\1***"),
    (re.compile(rf"({_NAME}[\"']?\s*[:=]\s*|--{_NAME}\s+)(?:{_VALUE})", re.IGNORECASE), r"\1***"),
)
"""Escape sequences of terminals; userinfo and queries of URLs; values of keys with such a name."""


class ErrorClasses:
    """The classes of one run."""

    def __init__(self, own: Mapping[str, str]) -> None:
        """`own`: the profile's; they come first, and replace classes of the same name."""
        self._finds = {name: re.compile(_wildcard(text)).match for name, text in own.items()}
        self._finds |= {
            name: re.compile(text).search for name, text in CLASSES.items() if name not in own
        }

    def find(self, lines: Sequence[str], source: str) -> tuple[ErrorLine, ...]:
        """The last line of each class, in the order of the classes, without secrets."""
        # A secret that begins before the limit ends behind it.
        cut = [line.strip()[: 2 * MAX_LINE] for line in lines]
        found = []
        for name, finds in self._finds.items():
            line = next((one for one in reversed(cut) if finds(one[:MAX_LINE])), "")
            if line:
                found.append(ErrorLine(name, _without_secrets(line), source))
        return tuple(found)

    def first(self, found: Iterable[ErrorLine]) -> tuple[ErrorLine, ...]:
        """One line of each class, in the order of the classes; at most `MAX_CLASSES`."""
        by_class: dict[str, ErrorLine] = {}
        for one in found:
            by_class.setdefault(one.error_class, one)
        ordered = [by_class[name] for name in self._finds if name in by_class]
        return tuple(ordered[:MAX_CLASSES])


def _wildcard(text: str) -> str:
    """With * and ? alone; `fnmatch` also reads sets in brackets."""
    return fnmatch.translate(f"*{text.replace('[', '[[]')}*")


def _without_secrets(line: str) -> str:
    for pattern, replacement in _SECRETS:
        line = pattern.sub(replacement, line)
    return "".join(one if one.isprintable() else " " for one in line)[:MAX_LINE]
