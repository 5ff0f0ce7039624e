"""A rank that stays, in this process: guarded blocks, parking, and the restore in place.

The world has one rank. The test plays the agent, which ends a generation that no rank has left.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from ftrun import clock
from ftrun.agent.launch.rendezvous import make_store
from ftrun.agent.launch.zygote_client import send_request
from ftrun.errors import SnapshotError
from ftrun.ids import Generation, version
from ftrun.wire.messages import smp as smp_messages
from ftrun.wire.messages.worker import LaunchRequest, Parked, Revoke, encode_launch
from ftrun.wire.shared_memory.pages import (
    HeartbeatField,
    SharedPage,
    create_page,
    create_stack_file,
    stacks,
)
from ftrun.worker.process import introspection
from ftrun.worker.survivors.rejoin import StayingProcess
from ftrun.worker.survivors.set_up import SetUp
from tests.integration.in_process_worker import TIMEOUT_S, Run

BROKEN = RuntimeError("gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4321")


class StayingRun(Run):
    """A rank with a line to the agent."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.parked: list[Parked] = []
        self.stack_fds: list[int] = []
        self.threads: list[threading.Thread] = []
        self.lines: list[socket.socket] = []
        self.processes: list[StayingProcess] = []

    def attach(self, **given: Any) -> Any:
        context = self.next_context()
        self.line, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.lines.append(self.line)
        os.dup(self.line.fileno())  # open to the end of this process, which ends with its line
        descriptors = {"line": its.detach(), "stack": os.dup(self._stack())}
        context.launch = msgspec.structs.replace(context.launch, descriptors=descriptors)
        introspection.register_dumper(context)
        context.staying = StayingProcess(context, dict(os.environ))
        self.processes.append(context.staying)
        self.context = context
        return self.session_of(context, **given)

    def send_revoke(self) -> None:
        self.line.send(msgspec.json.encode(Revoke(self.context.generation)))
        give_up_s = clock.now_s() + TIMEOUT_S
        while not self.context.is_revoked:
            assert clock.now_s() < give_up_s
            clock.sleep(0.001)

    def revoke(self) -> None:
        """End the generation, and answer to the parked rank in a thread."""
        self.send_revoke()
        thread = threading.Thread(target=self.launch_again)
        thread.start()
        self.threads.append(thread)

    def launch_again(self) -> None:
        self.parked.append(msgspec.json.decode(self.line.recv(1 << 16), type=Parked))
        restore = self.newest
        generation = self.context.generation + 1
        self.ask(smp_messages.VoidAfter(restore.generation, restore.step))
        self.begin(generation, restore)
        self.store = make_store("127.0.0.1")
        page_fd = create_page("beat")
        self.page = SharedPage(page_fd)
        descriptors = {
            "heartbeat": page_fd,
            "command": os.dup(self.command_fd),
            "stack": self._stack(),
            "arena": self.arena_fd(),
            "stdout": os.dup(1),
            "stderr": os.dup(2),
        }
        variables = {**os.environ, "MASTER_ADDR": "127.0.0.1"}
        request = LaunchRequest(
            Generation(generation),
            self.context.rank,
            1,
            agent_pid=0,
            smp_socket=str(self.socket),
            restore=restore,
            snapshot=self.settings,
            descriptors=descriptors,
            variables={**variables, "MASTER_PORT": str(self.store.port), "OF_AGENT": "2"},
        )
        send_request(self.line, encode_launch(request), list(descriptors.values()))
        for fd in descriptors.values():
            if fd not in self.stack_fds:
                os.close(fd)

    @property
    def newest(self) -> Any:
        return self.committed_version()

    def _stack(self) -> int:
        self.stack_fds.append(create_stack_file("0"))
        return self.stack_fds[-1]

    def close(self) -> None:
        for thread in self.threads:
            thread.join(TIMEOUT_S)
        super().close()
        for line in self.lines:
            line.close()
        for process in reversed(self.processes):
            process.set_up.finish()
            process.groups.close()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[StayingRun]:
    before = dict(os.environ)
    made = StayingRun(tmp_path)
    try:
        yield made
    finally:
        made.close()
        os.environ.clear()
        os.environ.update(before)


class Training:
    """One linear layer; notes what each step has computed."""

    def __init__(self, run: StayingRun, **given: Any) -> None:
        torch.manual_seed(3)
        self.model = nn.Linear(3, 1)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.session = run.attach(model=self.model, optimizer=self.optimizer, **given)
        self.losses: dict[int, float] = {}

    def step(self, at: int) -> float:
        self.optimizer.zero_grad()
        loss = self.model(torch.rand(4, 3)).square().mean()
        loss.backward()
        self.optimizer.step()
        assert self.losses.setdefault(at, loss.item()) == loss.item(), at
        return loss.item()

    def state(self) -> list[torch.Tensor]:
        states = [*self.optimizer.state.values()]
        return [*self.model.parameters(), *(one for state in states for one in state.values())]


def undisturbed(run: StayingRun, steps: int) -> dict[int, float]:
    made = Training(run)
    for at in made.session.steps(steps):
        made.step(at)
    return made.losses


# --- what the block does with errors ----------------------------------------------------------


def test_a_turn_broken_by_a_lost_peer_is_made_again_with_the_same_bits(run: StayingRun) -> None:
    made = Training(run)
    has_failed = False
    places: list[int] = []
    for at in made.session.steps(6):
        with made.session.guard() as turn:
            made.step(at)
            if at == 3 and not has_failed:
                has_failed = True
                places = [one.data_ptr() for one in made.state()]
                run.revoke()
                raise BROKEN
        assert turn.is_repeated == (at == 3 and run.context.is_revoked)
    assert made.session.step == 6
    assert [one.data_ptr() for one in made.state()] == places, "all memory is the same"
    (parked,) = run.parked
    assert (parked.first_step, parked.renewals, parked.problem) == (1, 0, "")
    assert parked.last_step >= 6
    assert run.context.generation == 1
    assert run.committed_version() == version(1, 6)
    model, losses = made.model.weight.clone(), made.losses
    other = Training(run)
    for at in other.session.steps(6):
        other.step(at)
    assert other.losses == {}, "the run has ended"
    assert torch.equal(other.model.weight, model)
    assert len(losses) == 6


def test_an_error_that_the_script_catches_itself_breaks_the_turn_too(run: StayingRun) -> None:
    made = Training(run)
    for at in made.session.steps(4):
        with made.session.guard():
            try:
                made.step(at)
                if at == 2 and not run.parked:
                    run.revoke()
                    raise BROKEN
            except RuntimeError:
                made.model.weight.data.fill_(7)
    assert len(run.parked) == 1
    assert made.session.step == 4
    assert sorted(made.losses) == [0, 1, 2, 3]


def test_any_error_of_a_generation_that_is_over_repeats_the_turn(run: StayingRun) -> None:
    made = Training(run)
    for at in made.session.steps(4):
        with made.session.guard():
            made.step(at)
            if at == 2 and not run.parked:
                run.revoke()
                raise FloatingPointError("the sum is not finite")
    assert len(run.parked) == 1


def test_an_error_of_the_script_is_raised_at_once(run: StayingRun) -> None:
    made = Training(run)
    since_s = clock.now_s()

    def fail(at: int) -> None:
        made.step(at)
        if at == 2:
            raise ValueError("no such key")

    with pytest.raises(ValueError, match="no such key"):
        list(made.session.run(fail, steps=4))
    assert clock.now_s() - since_s < run.context.launch.confirm_s


def test_a_lost_peer_that_the_agent_does_not_confirm_is_raised(run: StayingRun) -> None:
    made = Training(run)
    run.context.launch = msgspec.structs.replace(run.context.launch, confirm_s=0.2)
    since_s = clock.now_s()

    def fail(at: int) -> None:
        made.step(at)
        if at == 2:
            raise LookupError("no batch") from BROKEN

    with pytest.raises(LookupError):
        list(made.session.run(fail, steps=4))
    assert clock.now_s() - since_s >= 0.2


def test_an_interrupt_ends_the_script_even_if_the_generation_is_over(run: StayingRun) -> None:
    made = Training(run)

    def interrupted(at: int) -> None:
        made.step(at)
        if at == 2:
            run.send_revoke()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(made.session.run(interrupted, steps=4))
    parked = msgspec.json.decode(run.line.recv(1 << 16), type=Parked)
    assert "outside of a loop" in parked.problem


def test_the_end_of_a_generation_ends_a_wait_for_a_snapshot(run: StayingRun) -> None:
    made = Training(run)
    run.context.launch = msgspec.structs.replace(run.context.launch, num_nodes=2)
    errors = []
    for at in made.session.steps(4):
        with made.session.guard():
            made.step(at)
            if at == 2 and not run.parked:
                threading.Timer(0.2, run.revoke).start()
                try:
                    made.session.wait("protected")
                except SnapshotError as error:
                    errors.append(str(error))
                    raise
    (error,) = errors
    assert error.endswith("another rank has failed, and this process joins the next generation")
    assert len(run.parked) == 1


def test_results_of_broken_turns_are_not_handed_out(run: StayingRun) -> None:
    made = Training(run)
    held: list[Any] = []

    def turn(at: int) -> int:
        made.step(at)
        graph = torch.ones(1, requires_grad=True) * 2
        if at == 2 and not run.parked:
            held.append(weakref.ref(graph))
            run.revoke()
            raise BROKEN
        if at == 2:
            assert held[0]() is None, "the broken turn is released"
        return at

    assert list(made.session.run(turn, steps=4)) == [0, 1, 2, 3]


# --- parked, and restored ---------------------------------------------------------------------


def test_the_parked_process_takes_pages_streams_and_variables_of_its_new_request(
    run: StayingRun,
) -> None:
    made = Training(run)
    os.environ["OF_SCRIPT"] = "kept"
    for at in made.session.steps(4):
        with made.session.guard():
            made.step(at)
            if at == 1:
                first_page = SharedPage(run._fds[-1])
                assert first_page.get(HeartbeatField.MAY_STAY)
                assert first_page.stay_problem == ""
            if at == 2 and not run.parked:
                run.revoke()
                raise BROKEN
            if at == 3:
                assert run.page.get(HeartbeatField.MAY_STAY)
    page = run.page
    assert page.get(HeartbeatField.GENERATION) == 1
    assert page.get(HeartbeatField.STEP) == 4
    assert page.get(HeartbeatField.ATTACHED)
    assert page.get(HeartbeatField.SEALED_GENERATION) == 1
    assert first_page.get(HeartbeatField.SEALED_STEP) == 2
    assert (os.environ["OF_AGENT"], os.environ["OF_SCRIPT"]) == ("2", "kept")
    assert not page.get(HeartbeatField.MAY_STAY), "the loop has ended"
    os.kill(os.getpid(), page.get(HeartbeatField.HAS_DUMPER))
    assert "most recent call first" in stacks(run.stack_fds[-1])
    assert stacks(run.stack_fds[0]) == ""


def test_a_rank_goes_back_several_times(run: StayingRun) -> None:
    made = Training(run)
    num_lines = [one.name for one in threading.enumerate()].count("ftrun-line")
    mapped: list[int] = []
    for at in made.session.steps(12):
        with made.session.guard():
            made.step(at)
            if at % 3 == 2 and len(run.parked) == at // 3:
                mapped.append(Path("/proc/self/maps").read_text().count("/memfd:ftrun"))
                run.revoke()
                raise BROKEN
    assert [one.renewals for one in run.parked] == [0, 1, 2, 3]
    assert made.session.step == 12
    assert mapped[1:] == mapped[1:2] * 3, "no mapping of an earlier generation stays"
    threads = [one.name for one in threading.enumerate()]
    assert threads.count("ftrun-copy") <= 1
    assert threads.count("ftrun-line") == num_lines


def test_batches_come_again_and_the_loader_continues_behind_them(run: StayingRun) -> None:
    loader = DataLoader(TensorDataset(torch.arange(20.0)), batch_size=2, shuffle=True)
    given: dict[int, Any] = {}
    made = Training(run)
    session = made.session
    for epoch in session.epochs(2):
        for (batch,) in session.batches(loader):
            with session.guard():
                made.step(session.step)
                assert torch.equal(given.setdefault(session.step, batch), batch)
                if session.step in (4, 13) and len(run.parked) == session.step // 10:
                    run.revoke()
                    raise BROKEN
        assert epoch == session.step // 10 - 1
    assert [one.first_step for one in run.parked] == [1, 11]
    assert sorted(torch.cat([*given.values()][:10]).tolist()) == [*range(20)]


def test_a_loop_with_until_ends_there_also_if_its_last_boundary_is_the_restored_one(
    run: StayingRun,
) -> None:
    loader = DataLoader(TensorDataset(torch.arange(20.0)), batch_size=2, shuffle=True)
    made = Training(run)
    session, boundary = made.session, made.session._boundary

    def ended_after(**given: Any) -> None:
        boundary(**given)
        if session.step == 4 and not run.parked:
            session.wait("committed")
            run.revoke()

    session._boundary = ended_after
    turns = []
    for epoch in session.epochs(2):
        for _ in session.batches(loader, until=4):
            with session.guard():
                turns.append(session.step)
                made.step(session.step)
        assert epoch == 0
    assert len(run.parked) == 1
    assert (session.step, turns) == (4, [0, 1, 2, 3])
    assert run.context.restore == version(0, 4)
    (position,) = session._loaders
    assert position.state()["handed_out"] == 4, "another call continues the pass"


class Streamed(IterableDataset[torch.Tensor]):
    """Ten samples, whose number the loader does not know."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return map(torch.tensor, range(10))


def test_a_rank_with_a_loader_of_unknown_length_can_go_to_its_newest_version(
    run: StayingRun,
) -> None:
    made = Training(run)
    session = made.session
    given: dict[int, list[int]] = {}
    for batch in session.batches(DataLoader(Streamed(), batch_size=2)):
        with session.guard():
            made.step(session.step)
            assert given.setdefault(session.step, batch.tolist()) == batch.tolist()
            if session.step == 3 and not run.parked:
                run.revoke()
                raise BROKEN
    (parked,) = run.parked
    assert parked.first_step <= 3 <= parked.last_step
    assert given == {step: [2 * step, 2 * step + 1] for step in range(5)}


def test_the_gradient_mode_of_the_script_is_the_one_before_the_block(run: StayingRun) -> None:
    made = Training(run)
    for at in made.session.steps(4):
        with made.session.guard():
            made.step(at)
            if at == 2 and not run.parked:
                torch.set_grad_enabled(False)
                run.revoke()
                raise BROKEN
        assert torch.is_grad_enabled()


def test_records_of_boundaries_continue_on_the_new_page(run: StayingRun) -> None:
    made = Training(run)
    first_page = SharedPage(run._fds[-1])
    for at in made.session.steps(4):
        with made.session.guard():
            made.session.report(loss=made.step(at))
            if at == 2 and not run.parked:
                run.revoke()
                raise BROKEN
    assert run.page.samples == first_page.samples != ()
    assert sorted(run.page.records()) == [3, 4]
    assert run.page.records()[3].has_digest == first_page.records()[2].has_digest


class Noisy(Dataset[torch.Tensor]):
    """Ten samples with random draws."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, at: int) -> torch.Tensor:
        return at + torch.rand(1)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_iterator_that_the_script_holds_goes_back_in_its_pass_and_before_it(
    run: StayingRun, num_workers: int
) -> None:
    """Two batches in each step, five in each pass."""
    loader = DataLoader(Noisy(), batch_size=2, shuffle=True, num_workers=num_workers)
    given: dict[int, list[list[float]]] = {}
    made = Training(run)

    def batches() -> Iterator[torch.Tensor]:
        while True:
            yield from made.session.batches(loader)

    data = batches()
    for at in made.session.steps(9):
        with made.session.guard():
            two = [next(data).flatten().tolist() for _ in range(2)]
            made.step(at)
            assert given.setdefault(at, two) == two
            if at in (1, 3, 5) and len(run.parked) == at // 2:
                run.revoke()
                raise BROKEN
    assert len(run.parked) == 3
    every = [batch for at in range(9) for batch in given[at]]
    for first in range(0, 15, 5):
        rounded = sorted(int(x) for batch in every[first : first + 5] for x in batch)
        assert rounded == [*range(10)]


# --- processes that cannot stay ---------------------------------------------------------------


def test_outside_of_a_guarded_loop_a_rank_refuses(run: StayingRun) -> None:
    made = Training(run)
    assert run.page.stay_problem == "the script has not entered session.guard()"
    run.line.send(msgspec.json.encode(Revoke(0)))
    parked = msgspec.json.decode(run.line.recv(1 << 16), type=Parked)
    assert "outside of a loop with session.guard()" in parked.problem
    for at in made.session.steps(2):
        made.step(at)
    assert "no session.guard()" in run.page.stay_problem
    assert not run.page.get(HeartbeatField.MAY_STAY)


LEFT_BY_BREAK = """
import sys
from pathlib import Path
from ftrun.worker.survivors import line
from tests.integration.test_staying_in_process import StayingRun, Training

line._KILL_WAIT_S = 0.2
run = StayingRun(Path(sys.argv[1]))
print(run.smp.pid, flush=True)
made = Training(run)
for at in made.session.steps(4):
    with made.session.guard():
        made.step(at)
        if at == 2:
            run.send_revoke()
            break
print("after the loop")
"""


def test_a_process_that_leaves_its_loop_in_a_broken_turn_ends(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LEFT_BY_BREAK, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    smp, *later = done.stdout.splitlines()
    os.kill(int(smp), signal.SIGKILL)
    assert (done.returncode, later) == (1, []), done.stderr
    assert "the script has left its loop in a turn that is repeated" in done.stderr


def test_a_revocation_of_another_generation_has_no_effect(run: StayingRun) -> None:
    made = Training(run)
    for at in made.session.steps(3):
        with made.session.guard():
            made.step(at)
            run.line.send(msgspec.json.encode(Revoke(7)))
    assert not run.context.is_revoked
    assert made.session.step == 3


def test_a_turn_without_a_guard_is_named(run: StayingRun) -> None:
    made = Training(run)
    for at in made.session.steps(4):
        if at != 1:
            with made.session.guard():
                made.step(at)
        else:
            made.step(at)
        assert run.page.get(HeartbeatField.MAY_STAY) == int(at < 2)
    assert "no session.guard()" in run.page.stay_problem


def test_without_snapshots_a_rank_cannot_stay(run: StayingRun) -> None:
    run.settings = msgspec.structs.replace(run.settings, enabled=False)
    made = Training(run)
    for at in made.session.steps(2):
        with made.session.guard():
            made.step(at)
    assert "no snapshots" in run.page.stay_problem


def test_a_bug_in_the_check_of_this_rank_costs_the_stay_and_not_the_script(
    run: StayingRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def breaks(*_: object) -> str:
        calls.append(1)
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(SetUp, "unknown", breaks)
    made = Training(run)
    for at in made.session.steps(3):
        with made.session.guard():
            made.step(at)
    assert run.page.stay_problem == "a bug in ftrun: ZeroDivisionError('a bug')"
    assert len(calls) == 1, "once in a loop"


class ReadingAhead(DataLoader[Any]):
    """As Accelerate's loaders."""

    def __iter__(self) -> Any:
        return super().__iter__()


def test_a_loader_that_cannot_go_back_is_named(run: StayingRun) -> None:
    made = Training(run)
    for at in made.session.steps(3):
        with made.session.guard():
            made.step(at)
            assert run.page.get(HeartbeatField.MAY_STAY) == int(at < 2)
            if at == 1:
                next(iter(made.session.batches(ReadingAhead(Noisy()))))
    assert run.page.stay_problem == "loader has an iteration of its own, which cannot go back"


def test_statements_behind_the_block_are_reported_once(
    run: StayingRun, caplog: pytest.LogCaptureFixture
) -> None:
    made = Training(run)
    for at in made.session.steps(3):
        with made.session.guard():
            made.step(at)
        at += 1
    assert caplog.text.count("statements follow the block of session.guard()") == 1
