"""One agent, after its warm start.

The SMP and the node check start first, because they overlap with the imports of the zygote.
"""

import logging
import os
import signal
import sys
import traceback
from pathlib import Path

import msgspec

from ftrun.agent.launch.agent_start import Started, script_folder, set_thread_count
from ftrun.agent.launch.process import ChildProcess
from ftrun.agent.launch.zygote_client import ZygoteClient
from ftrun.agent.snapshots.retained_memory import (
    PersistedAgentState,
    StubClient,
    decode_state,
    kept,
    newer,
)
from ftrun.agent.snapshots.smp_client import AgentSmpClient
from ftrun.config.run_spec import RunSpec
from ftrun.errors import ExitCode, FtrunError, InternalError, PeerError
from ftrun.journal import Journal
from ftrun.records.run import AgentStarted, ErrorRecord, InternalErrorRecord
from ftrun.records.snapshots import MemoryAdopted, RunStateRejected
from ftrun.wire.messages.agent_start import ZygoteSettings
from ftrun.wire.run_environment import RunFolder


def main(started: Started) -> int:
    folder = RunFolder(Path(sys.argv[1]))
    spec = msgspec.json.decode(folder.spec.read_bytes(), type=RunSpec)
    _set_up_logging(spec)
    folder.keep_mark.unlink(missing_ok=True)
    node_id = spec.nodes.node_id if spec.nodes is not None else ""
    journal = Journal(Path(spec.log_folder), node=node_id)
    journal.write(AgentStarted(started.is_forked))
    smp = AgentSmpClient(folder, spec.profile.smp.orphan_timeout_s)
    zygote: ZygoteClient | None = None
    preflight = None
    retain_memory = False
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # the stub has blocked it
        zygote = _zygote(spec, started, journal)
        stub = StubClient()
        known = _take_over(smp, journal, spec)
        from ftrun.agent.observe.node_check import NodeCheck

        preflight = NodeCheck(spec, journal)
        preflight.begin(is_awaited=known.plan is not None)
        from ftrun.agent.launcher import launch

        code = launch(spec, journal, smp, zygote, stub, kept=known, preflight=preflight)
        retain_memory = _retain_resumed_memory(code, folder, spec, smp)
        return code
    except KeyboardInterrupt:  # before the run loop handles signals; usually during an import
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        journal.write(ErrorRecord("stopped before the first start", "KeyboardInterrupt"))
        sys.stderr.write("ftrun: stopped by SIGINT before anything was started\n")
        return ExitCode.INTERRUPTED
    except FtrunError as error:
        journal.write(ErrorRecord(str(error), type(error).__name__))
        sys.stderr.write(f"ftrun: {error}\n")
        retain_memory = _retain_resumed_memory(error.exit_code, folder, spec, smp)
        return error.exit_code
    except Exception as error:  # noqa: BLE001 - the process loop: anything here is our bug
        _report_bug(error, spec, journal)
        # The stub starts another agent, which continues with the memory that the SMP keeps.
        folder.crash_mark.touch()
        retain_memory = True
        return InternalError.exit_code
    finally:
        if preflight is not None:
            preflight.close()
        if zygote is not None:
            zygote.close()
        if not retain_memory:
            smp.shutdown()


def _zygote(spec: RunSpec, started: Started, journal: Journal) -> ZygoteClient | None:
    if started.error is not None:
        raise started.error
    os.chdir(spec.cwd)
    set_thread_count(spec.torchrun_argv)
    if spec.profile.start.mode != "warm":
        return None
    start = msgspec.to_builtins(spec.profile.start)
    folder = script_folder(spec.script, spec.cwd)
    zygote = ZygoteClient(ZygoteSettings.of(folder, start, spec.torchrun_argv), journal)
    if started.zygote is None:
        zygote.start()
    else:
        control, pid = started.zygote
        zygote.adopt(control, ChildProcess(pid, "zygote"))
    return zygote


def _set_up_logging(spec: RunSpec) -> None:
    level = logging.DEBUG if spec.debug else logging.ERROR if spec.quiet else logging.WARNING
    logging.basicConfig(level=level, format="ftrun: %(message)s", stream=sys.stderr)
    if not spec.quiet:
        logging.getLogger("ftrun").setLevel(min(level, logging.INFO))


def _report_bug(error: Exception, spec: RunSpec, journal: Journal) -> None:
    journal.write(InternalErrorRecord(traceback.format_exc()))
    traceback.print_exc()
    sys.stderr.write(
        f"ftrun: this is a bug in ftrun ({type(error).__name__}); please report it with "
        f"{spec.log_folder}/journal.jsonl\n"
    )


def _retain_resumed_memory(
    code: int, folder: RunFolder, spec: RunSpec, smp: AgentSmpClient
) -> bool:
    """Keep the memory after the run if it was adopted and this run has committed nothing.

    A changed script or a wrong number of ranks must not cost the snapshots of the earlier run.
    """
    if not (0 < code < 128 and smp.was_adopted and smp.num_commits == 0):
        return False
    folder.keep_mark.touch()
    sys.stderr.write(
        f"ftrun: the snapshots are intact and kept for {smp.orphan_timeout_s:.0f} s: fix the cause "
        "and "
        f"start again with --run-id {spec.run_id}, or free them with `ftrun stop {spec.run_id}`\n"
    )
    return True


def _take_over(smp: AgentSmpClient, journal: Journal, spec: RunSpec) -> PersistedAgentState:
    """Adopt the memory of an earlier agent, or start an SMP; return the persisted agent state."""
    fds, from_stub = kept()
    left = smp.find()
    if left is None:
        smp.memory.adopt(fds)
        smp.start()
    else:
        try:
            smp.complete(fds)
        except PeerError:
            smp.lost()
            smp.start()
    from_smp = decode_state(left or b"")
    for holder, found in (("SMP", from_smp), ("stub", from_stub)):
        if found is None:
            text = f"the state of the run in the {holder} has another form, and is not used"
            journal.write(RunStateRejected(f"{text}: ftrun was replaced while the run was alive"))
    state = newer(from_smp or PersistedAgentState(), from_stub or PersistedAgentState())
    if state.plan is not None:
        generation = state.plan.generation
        own = spec.nodes.node_id if spec.nodes is not None else None
        members = [node for node in state.plan.members if own in (None, node.node_id)]
        smp.own(rank for node in members for rank in node.ranks)
        journal.write(MemoryAdopted(len(smp.memory.held), generation))
    return state
