"""Launch requests of ranks that a test starts in place of an agent."""

from typing import Any

import msgspec

from ftrun.ids import Generation, Rank, RunId
from ftrun.wire.messages.worker import LaunchRequest, encode_launch
from ftrun.wire.run_environment import GENERATION, LAUNCH, RUN_ID
from ftrun.wire.shared_memory.pages import SharedPage, create_command_page, create_page
from ftrun.worker.context import WorkerContext


def launch_request(**changes: Any) -> LaunchRequest:
    """A first start of one rank; pid 0 is no agent, so the rank does not end with one."""
    made = LaunchRequest(Generation(0), Rank(0), 1, agent_pid=0, smp_socket="/nonexistent/smp.sock")
    return msgspec.structs.replace(made, **changes)


def launch_variables(run_id: str, request: LaunchRequest) -> dict[str, str]:
    return {
        "RANK": str(request.rank),
        "WORLD_SIZE": str(request.world_size),
        RUN_ID: run_id,
        GENERATION: str(request.generation),
        LAUNCH: encode_launch(request).decode(),
    }


def context_of(
    request: LaunchRequest | None = None,
    *,
    page: SharedPage | None = None,
    commands: SharedPage | None = None,
) -> WorkerContext:
    """Context of a rank in this process; with pages of its own if none are given."""
    return WorkerContext(
        RunId("run"),
        request or launch_request(),
        page or SharedPage(create_page("beat")),
        commands or SharedPage(create_command_page()),
    )
