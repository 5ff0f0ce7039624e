"""An exception of the script is shown with what ftrun knows about it."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ftrun.wire.shared_memory.pages import (
    HeartbeatField,
    SharedPage,
    create_command_page,
    create_page,
    create_stack_file,
)
from ftrun.worker.process.startup import explain_missing_name
from tests.launch_requests import launch_request, launch_variables


@pytest.fixture
def page() -> SharedPage:
    """The script error of a process that was restored at step 20."""
    made = SharedPage(create_page("beat"))
    made.set(HeartbeatField.RESTORE_END_NS, 1)
    made.set(HeartbeatField.RESTORED_STEP, 20)
    return made


@pytest.mark.parametrize("error", [NameError("step"), UnboundLocalError("step")])
def test_a_missing_name_is_explained_where_the_loop_had_no_turn(
    page: SharedPage, error: Exception
) -> None:
    explain_missing_name(error, page)
    assert "step 20 is restored" in error.__notes__[0]


def test_other_errors_and_processes_that_made_a_step_are_left_alone(page: SharedPage) -> None:
    other, missing = KeyError("step"), NameError("step")
    explain_missing_name(other, page)
    page.set(HeartbeatField.FIRST_STEP_NS, 1)
    explain_missing_name(missing, page)
    assert not hasattr(other, "__notes__")
    assert not hasattr(missing, "__notes__")


def test_a_script_whose_loop_had_no_turn_ends_with_the_explanation() -> None:
    """Through `report`, in a process of its own with the pages of a restored rank."""
    program = """
import os
from ftrun.wire.messages.worker import LaunchRequest, encode_launch
from ftrun.wire.shared_memory.pages import (
    HeartbeatField, SharedPage, create_command_page, create_page,
)
from ftrun.wire.shared_memory.pages import create_stack_file
from ftrun.worker.process.startup import report_error

fd = create_page("heartbeat")
page = SharedPage(fd)
page.set(HeartbeatField.RESTORE_END_NS, 1)
page.set(HeartbeatField.RESTORED_STEP, 20)
fds = {"heartbeat": fd, "command": create_command_page(), "stack": create_stack_file("0")}
request = LaunchRequest(1, 0, 1, agent_pid=os.getppid(), smp_socket="x", descriptors=fds)
os.environ |= {"FTRUN_RUN_ID": "test", "RANK": "0", "FTRUN_LAUNCH": encode_launch(request).decode()}
try:
    for step in ():
        pass
    print(step)
except NameError as error:
    report_error(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert "NameError: name 'step' is not defined" in done.stderr, done.stderr
    assert "ftrun: this process has made no step, because step 20 is restored" in done.stderr


def test_the_page_has_the_time_at_which_torch_initialises_a_device() -> None:
    """In a process of its own, because a device module cannot be removed."""
    program = """
import types, torch
from ftrun.wire.shared_memory.pages import HeartbeatField, SharedPage, create_page
from ftrun.worker.process.heartbeat import _time_device

calls = []
page = SharedPage(create_page("heartbeat"))
_time_device(page)  # a CPU build: there is nothing to wait for
torch.utils.rename_privateuse1_backend("gadget")
torch._register_device_module("gadget", types.SimpleNamespace(_lazy_call=calls.append))
torch.accelerator.current_accelerator = lambda: torch.device("gadget")
_time_device(page)
assert page.get(HeartbeatField.DEVICE_NS) == 0
calls.pop()()
assert page.get(HeartbeatField.DEVICE_NS) > 0 and not calls
print("noted")
"""
    run = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=240
    )
    assert run.stdout == "noted\n", run.stderr


def test_a_standby_runs_no_backward_if_torch_is_built_for_a_device() -> None:
    """A backward queries all devices, before the environment of the rank is set."""
    program = """
import torch
from ftrun.worker.process import startup

calls = []
torch.Tensor.backward = lambda tensor: calls.append("backward")
torch.optim.AdamW.step = lambda optimizer: calls.append("step")
torch.accelerator.current_accelerator = lambda: None  # a build for CUDA names it without a GPU too
startup._warm_up()
assert calls == ["backward", "step"], calls
torch.accelerator.current_accelerator = lambda: torch.device("cuda")
startup._warm_up()
assert calls == ["backward", "step"], calls
print("idle")
"""
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-c", program],
        check=False,
        capture_output=True,
        text=True,
        env=variables,
        timeout=240,
    )
    assert run.stdout == "idle\n", run.stderr


def test_an_idle_standby_warms_up_groups_and_leaves_nothing_of_it() -> None:
    program = """
import json, os, random, socket, sys
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace_json
from ftrun.worker.process import startup

begun, init = [], dist.init_process_group
def noted(*args, **kwargs):
    begun.append(kwargs["world_size"])
    init(*args, **kwargs)
dist.init_process_group = noted
for given in (None, "none-such"):  # the rank reports its interface, if it makes a group
    if given:
        os.environ["GLOO_SOCKET_IFNAME"] = given
    hook, state, environ = sys.excepthook, torch.get_rng_state(), dict(os.environ)
    numbers, threads = random.getstate(), len(os.listdir("/proc/self/task"))
    startup._warm_up_groups()
    assert not dist.is_initialized()
    assert len(os.listdir("/proc/self/task")) == threads
    assert sys.excepthook is hook and os.environ == environ
    assert torch.equal(torch.get_rng_state(), state) and random.getstate() == numbers
assert begun == [1, 1], begun
del os.environ["GLOO_SOCKET_IFNAME"]
torch.accelerator.current_accelerator = lambda: torch.device("cuda")
startup._warm_up_groups()
assert begun == [1, 1], begun
torch.accelerator.current_accelerator = lambda: None

os.environ["TORCH_FR_BUFFER_SIZE"] = "3"  # as the launch request does
init("gloo", store=dist.HashStore(), rank=0, world_size=1)
assert dist.distributed_c10d._get_default_group().group_name == "0"
for _ in range(5):
    dist.all_reduce(torch.ones(1))
left = json.loads(_dump_fr_trace_json(includeCollectives=True))
assert [one["collective_seq_id"] for one in left["entries"]] == [3, 4, 5], left
assert [one["ranks"] for one in left["pg_config"].values()] == ["[0]"], left
print("warm")
"""
    run = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=240
    )
    assert run.stdout == "warm\n", run.stderr


def test_a_fresh_start_knows_which_variables_the_script_has_set_before_it_imports_torch(
    tmp_path: Path,
) -> None:
    """A later launch request leaves those alone."""
    script = tmp_path / "train.py"
    script.write_text("""
import os
os.environ |= {"OF_SCRIPT": "1", "GIVEN": "2"}
import torch
from ftrun.worker.context import worker_context
staying = worker_context().staying
staying._set_variables({"GIVEN": "1", "NEW": "3"})
print(*map(os.environ.get, ("OF_SCRIPT", "GIVEN", "NEW")))
""")
    agent, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    fds = {
        "heartbeat": create_page("beat"), "command": create_command_page(),
        "stack": create_stack_file("0"), "line": its.fileno(),
    }  # fmt: skip
    request = launch_request(descriptors=fds, agent_pid=os.getpid())
    done = subprocess.run(
        [sys.executable, "-u", "-m", "ftrun.worker.process.startup", "script", str(script)],
        env={**os.environ, **launch_variables("run", request), "GIVEN": "1"},
        pass_fds=list(fds.values()), capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.stdout == "1 2 3\n", done.stderr
    for fd in list(fds.values())[:3]:
        os.close(fd)
    agent.close()
    its.close()
