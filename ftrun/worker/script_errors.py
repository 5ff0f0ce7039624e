"""An exception that reaches the top of the user's script: shown, and kept for the agent.

Runs in:  worker.
Takes in: the exception.
Gives:    the traceback on stderr without ftrun's own frames, and torch's error file, in the form
          that `@record` writes, for scripts that do not use it.

The file carries the time of the failure, which tells the first cause from its consequences: a
rank that fails takes its connections along, and the others then fail too.
"""

import json
import os
import sys
import traceback
from types import TracebackType

from ftrun import clock
from ftrun.worker import heartbeat, visibility

_OWN_FOLDER = os.path.dirname(os.path.abspath(__file__))


def report(error: BaseException) -> None:
    """Write the error file, then print as the interpreter would."""
    trace = _users_part(error.__traceback__)
    heartbeat.script_failed(clock.now_ns())
    visibility.dump_calls()
    write_error_file(error, trace)
    sys.excepthook(type(error), error.with_traceback(trace), trace)
    sys.stderr.flush()


def write_error_file(error: BaseException, trace: TracebackType | None) -> None:
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or os.path.exists(path):
        return  # @record was there first
    text = "".join(traceback.format_exception(type(error), error, trace))
    document = {
        "message": {
            "message": f"{type(error).__name__}: {error}",
            "errorCode": 1,
            "extraInfo": {"py_callstack": text, "timestamp": str(int(clock.wall_s()))},
        }
    }
    try:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(document, file)
    except OSError as problem:
        sys.stderr.write(f"ftrun: no error file at {path}: {problem.strerror}\n")


def _users_part(trace: TracebackType | None) -> TracebackType | None:
    part = trace
    while part is not None:
        folder = os.path.dirname(os.path.abspath(part.tb_frame.f_code.co_filename))
        if folder != _OWN_FOLDER and "runpy" not in part.tb_frame.f_code.co_filename:
            return part
        part = part.tb_next
    return None  # a syntax error: no frame of the user's ran
