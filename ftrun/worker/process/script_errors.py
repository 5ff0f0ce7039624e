"""Reports an uncaught exception of the user's script.

Runs in:  worker.
Takes in: the exception.
Gives:    the traceback on stderr without ftrun's own frames, and torch's error file in the format
          of `@record`, for scripts that do not use it.

The file holds the time of the failure, which identifies the first cause. When a rank fails, its
connections close, and other ranks then fail too.
"""

import json
import os
import sys
import traceback
from types import TracebackType

from ftrun import clock
from ftrun.wire.shared_memory.pages import HeartbeatField, SharedPage
from ftrun.worker.context import worker_context
from ftrun.worker.process import heartbeat
from ftrun.worker.process import introspection as visibility

_OWN_FOLDER = f"{os.sep}worker{os.sep}"
_PACKAGE = os.path.abspath(__file__).rpartition(_OWN_FOLDER)[0] + os.sep


def report(error: BaseException) -> None:
    """Write the error file, then print the traceback as the interpreter would."""
    trace = _users_part(error.__traceback__)
    context = worker_context()
    if context is not None:
        explain_missing_name(error, context.page)
        heartbeat.script_failed(context, clock.now_ns())
        visibility.dump_calls(context)
    write_error_file(error, trace)
    if isinstance(error, KeyboardInterrupt) and _ends_in_ftrun(trace):
        return  # the rank waited for the end of the run, so no line of the script was interrupted
    sys.excepthook(type(error), error.with_traceback(trace), trace)
    sys.stderr.flush()


def explain_missing_name(error: BaseException, page: SharedPage) -> None:
    """Add a note to a NameError if a restored process has made no step."""
    is_restored = page.get(HeartbeatField.RESTORE_END_NS) > 0
    step = page.get(HeartbeatField.RESTORED_STEP)
    if isinstance(error, NameError) and is_restored and not page.get(HeartbeatField.FIRST_STEP_NS):
        error.add_note(
            f"ftrun: this process has made no step, because step {step} is restored. "
            " If the loop over steps assigns this name, the loop had no turn: after the "
            "loop, use session.step and session.state"
        )


def write_error_file(error: BaseException, trace: TracebackType | None) -> None:
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or os.path.exists(path):
        return  # @record has written it
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


def _ends_in_ftrun(trace: TracebackType | None) -> bool:
    file = ""
    while trace is not None:
        file, trace = trace.tb_frame.f_code.co_filename, trace.tb_next
    return os.path.abspath(file).startswith(_PACKAGE)


def _users_part(trace: TracebackType | None) -> TracebackType | None:
    part = trace
    while part is not None:
        file = os.path.abspath(part.tb_frame.f_code.co_filename)
        is_own = file.startswith(_PACKAGE.removesuffix(os.sep) + _OWN_FOLDER)
        if not is_own and "runpy" not in file:
            return part
        part = part.tb_next
    return None  # a syntax error: no user frame ran
