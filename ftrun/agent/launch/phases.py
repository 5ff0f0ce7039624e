"""How long each phase of a restart took on this node, from the pages of its ranks.

Each phase ends when the last rank has completed it. The phases follow one another, so their sum is
the time from the notice of the failure to the end of the first step.
"""

from collections.abc import Sequence

from ftrun.records.recovery import Recovered
from ftrun.wire.shared_memory.pages import HeartbeatField, SharedPage


def phases_of(
    restart: Recovered, pages: Sequence[SharedPage], *, memory_s: float
) -> dict[str, float]:
    """Seconds of each phase, in order, from pages of ranks that have completed a step.

    `device` and `device_memory` only if a device was used.
    """

    def last_s(at: HeartbeatField) -> float:
        return max(page.get(at) for page in pages) / 1e9

    script_s = last_s(HeartbeatField.STARTED_NS)
    group_s = max(last_s(HeartbeatField.INIT_GROUP_NS), script_s)
    device_s = last_s(HeartbeatField.DEVICE_NS)
    restored_s = max(last_s(HeartbeatField.RESTORE_END_NS), group_s)
    restoring_s = max(
        (page.get(HeartbeatField.RESTORE_END_NS) - page.get(HeartbeatField.RESTORE_BEGIN_NS)) / 1e9
        for page in pages
    )
    # Ranks that stay, and those that join them, restore before they connect.
    is_first = last_s(HeartbeatField.RESTORE_END_NS) < group_s
    restoring_first_s, restoring_last_s = (restoring_s, 0.0) if is_first else (0.0, restoring_s)
    before_group_s = device_s - script_s if script_s < device_s <= group_s else 0.0
    after_group_s = device_s - group_s if group_s < device_s <= restored_s - restoring_s else 0.0
    return {
        "decide": restart.decided_s - restart.stopped_s,
        "stop": restart.stopped_s - restart.noticed_s,
        **({"device_memory": memory_s} if memory_s else {}),
        "fork": script_s - restart.decided_s - memory_s,
        **({"device": before_group_s} if before_group_s else {}),
        "rendezvous": group_s - script_s - before_group_s - restoring_first_s,
        **({"device": after_group_s} if after_group_s else {}),
        "build": restored_s - group_s - restoring_last_s - after_group_s,
        "restore": restoring_s,
        "first_step": last_s(HeartbeatField.FIRST_STEP_NS) - restored_s,
    }
