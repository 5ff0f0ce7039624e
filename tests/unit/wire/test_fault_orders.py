"""The catalogue is complete, options are validated, and a page shows what has fired."""

import os

import msgspec
import pytest

from ftrun.errors import UsageError
from ftrun.wire.fault_catalog import FAULTS, TARGETS
from ftrun.wire.fault_orders import FaultOrder, FaultPage, FaultPages, duration_s, make_order

EVERY_KIND = """
    rank-kill segv abort exception exit0-early stop hang gil-hold busy-loop collective-skip slow nan
    spike poison-batch oom smp-kill smp-stop agent-kill agent-stop zygote-kill leader-kill node-loss
    freeze partition one-way-partition slow-link lossy-link bitflip-shm bitflip-wire
    fragment-truncate
    fragment-stale torn-snapshot weight-bitflip corrupt-checkpoint shm-full disk-full fd-limit
    pid-limit cpu-starve clock-jump slow-input
"""


def test_the_catalogue_has_every_kind() -> None:
    assert sorted(FAULTS) == sorted(EVERY_KIND.split())


@pytest.mark.parametrize("kind", FAULTS.values(), ids=lambda kind: kind.name)
def test_a_kind_reports_what_it_does_and_what_is_seen(kind: object) -> None:
    for name in ("does", "seen", "lost"):
        assert getattr(kind, name)
    assert kind.target in TARGETS  # type: ignore[attr-defined]
    assert bool(kind.unit) == bool(kind.amount)  # type: ignore[attr-defined]
    if kind.is_inside:  # type: ignore[attr-defined]
        assert kind.by_rank  # type: ignore[attr-defined]


def test_an_order_has_what_its_kind_has_unless_it_is_typed() -> None:
    assert make_order("a", "slow", rank=1).amount == 0.5
    assert make_order("a", "slow", rank=1, amount=0.2).amount == 0.2
    assert make_order("a", "freeze").for_s == FAULTS["freeze"].for_s
    assert make_order("a", "freeze", for_s=3.0).for_s == 3.0
    assert make_order("a", "poison-batch", at_step=4).fires_again
    assert make_order("a", "segv", rank=0, again=True).fires_again


@pytest.mark.parametrize(
    ("kind", "more", "words"),
    [
        ("rank-kil", {}, "Did you mean rank-kill?"),
        ("earthquake", {}, "--list"),
        ("segv", {"node": "a"}, "not --node a"),
        ("smp-kill", {"rank": 1}, "not --rank 1"),
        ("segv", {"rank": -1}, "0 or more"),
        ("segv", {"at_step": 0}, "1 or more"),
        ("poison-batch", {"rank": 1}, "needs --at-step"),
        ("hang", {"for_s": 0.0}, "--for must be above 0"),
        ("segv", {"amount": 3.0}, "takes no --amount"),
        ("slow", {"amount": float("nan")}, "a finite number"),
        ("smp-kill", {"again": True}, "--again"),
    ],
)
def test_what_does_not_go_together_is_refused(
    kind: str, more: dict[str, object], words: str
) -> None:
    with pytest.raises(UsageError, match=words.replace("?", r"\?")):
        make_order("a", kind, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "seconds"), [("5", 5.0), ("5s", 5.0), ("500ms", 0.5), ("2m", 120.0), ("1.5h", 5400.0)]
)
def test_a_time_has_a_unit(text: str, seconds: float) -> None:
    assert duration_s(text) == seconds


@pytest.mark.parametrize("text", ["", "s", "5 parsecs", "5x", "nan", "inf", "5mm"])
def test_a_time_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="500ms"):
        duration_s(text)


def test_a_page_carries_an_order_and_its_marks() -> None:
    pages = FaultPages()
    page, rank = pages.by_rank, 3
    fd = pages.fd_of(rank)
    assert pages.fd_of(rank) == fd
    agents, ranks = page[rank], FaultPage(os.dup(fd))
    assert ranks.ordered == 0
    order = make_order("f1", "hang", rank=3, at_step=7, for_s=2.5)
    assert agents.put(order) == 1
    assert ranks.order() == order
    ranks.mark_fired(1, 7, 123)
    assert (agents.fired, agents.fired_step, agents.fired_ns, agents.times) == (1, 7, 123, 1)
    ranks.mark_ended(1)
    assert agents.ended == 1
    assert agents.put(make_order("f2", "segv", rank=3)) == 2
    assert (agents.fired, agents.times) == (1, 0)
    ranks.close()
    agents.close()


def test_the_longest_order_fits_a_page() -> None:
    page = FaultPage.create(0)
    longest = FaultOrder("f" * 64, "collective-skip", 1 << 40, "n" * 255, 1 << 60, 1e300, 1e300)
    page.put(longest)
    assert page.order() == longest
    assert len(msgspec.msgpack.encode(longest)) < 2048
    page.close()
