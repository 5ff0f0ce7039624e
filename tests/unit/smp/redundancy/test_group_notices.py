"""Notices of a protection group: what is news is reported once."""

from ftrun.ids import version
from ftrun.smp.redundancy.group import GroupNotices
from ftrun.wire.messages.smp import SmpNotice


def test_lost_protection_is_reported_again_only_for_another_reason() -> None:
    sent: list[SmpNotice] = []
    notices = GroupNotices(sent.append)  # type: ignore[arg-type]
    for step in range(1, 50):
        notices.unprotected(version(0, step), f"parity needs 400 MB, but only {step}.5 MB are free")
    assert [one.kind for one in sent] == ["unprotected"]
    notices.unprotected(version(0, 50), "node b does not answer")
    notices.unprotected(version(0, 51), "node gpu-3: no memory")
    notices.unprotected(version(0, 52), "node gpu-7: no memory")
    notices.protected()
    notices.unprotected(version(0, 60), "node b does not answer")
    assert len(sent) == 5
