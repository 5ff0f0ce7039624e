"""The shares of a rank and the digests of all shared bytes, on tensors in main memory."""

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ftrun.errors import PeerLost
from ftrun.ids import Rank
from ftrun.snapshot.replica_shares import NUM_PHASES, is_shareable
from ftrun.wire.shared_memory.pages import CommandField, SharedPage, create_command_page
from ftrun.worker.capture.device_sources import DeviceCopies
from ftrun.worker.replicas.shares import (
    BLOCK_BYTES,
    CheckedReplicas,
    ReplicaShares,
    shares_of_rank,
)
from ftrun.worker.state.attached import AttachedState
from ftrun.worker.state.state_tree import BoundaryState, PersistentSources, StateTree

MEMBERS = (Rank(1), Rank(4), Rank(6))


def trained() -> tuple[PersistentSources, nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(700, 1000), nn.Conv2d(64, 301, 3))
    model[1].to(memory_format=torch.channels_last)
    attached = AttachedState()
    attached.add("model", model)
    attached.add("optimizer", torch.optim.SGD(model.parameters(), 0.1))
    return StateTree(attached).persistent(), model


def test_the_shares_of_all_members_make_up_each_tensor() -> None:
    whole, _ = trained()
    shares = [shares_of_rank(whole, MEMBERS, rank) for rank in MEMBERS]
    assert all(one.members == MEMBERS for one in shares)
    for at, source in enumerate(whole.sources):
        parts = [one.sources[at] for one in shares]
        if is_shareable(source.entry):
            assert all(part.entry.whole_shape == source.entry.shape for part in parts)
            assert torch.equal(torch.cat([part.tensor for part in parts]), source.tensor)
        else:
            assert all(part is source for part in parts)


def test_a_change_of_the_tensor_is_a_change_of_its_shares() -> None:
    whole, model = trained()
    (share,) = [
        one for one in shares_of_rank(whole, MEMBERS, 4).sources if one.name == "model.0.weight"
    ]
    before = share.tensor._version
    with torch.no_grad():
        model[0].weight.add_(1.0)
    assert share.tensor._version > before


def test_a_tensor_that_is_left_out_stays_whole() -> None:
    whole, _ = trained()
    shares = shares_of_rank(whole, MEMBERS, 6, ["model.0.weight"])
    parts = {one.name: one.part for one in shares.sources}
    assert parts["model.0.weight"] is None
    assert parts["model.1.weight"] is not None


def digests(whole: PersistentSources, key: int = 7) -> list[int]:
    shared = [one for one in whole.sources if is_shareable(one.entry)]
    checked = CheckedReplicas(shared, key)
    found = [checked.begin(phase, DeviceCopies(())) for phase in range(NUM_PHASES)]
    return [one() for one in found if one is not None]


@pytest.mark.parametrize("at", [(0, 0, 0), (0, 999, 699), (1, 0, 5), (1, 300, 63)])
def test_each_byte_is_hashed_in_exactly_one_phase(at: tuple[int, int, int]) -> None:
    whole, model = trained()
    before = digests(whole)
    layer, row, column = at
    with torch.no_grad():
        model[layer].weight[row, column] += 1.0
    after = digests(whole)
    # A line of the sample may hold it too.
    assert 1 <= sum(one != other for one, other in zip(before, after, strict=True)) <= 2


@pytest.mark.parametrize("layer", [0, 1])
def test_each_phase_has_samples_of_every_tensor(layer: int) -> None:
    whole, model = trained()
    before = digests(whole)
    with torch.no_grad():
        model[layer].weight += 1.0
    assert not set(digests(whole)) & set(before)


def test_digests_depend_on_the_key_and_not_on_the_order_of_the_tensors() -> None:
    whole, _ = trained()
    assert model_bytes(whole) > 2 * BLOCK_BYTES
    shared = [one for one in whole.sources if is_shareable(one.entry)]
    one, other = (
        CheckedReplicas(some, 7).begin(0, DeviceCopies(())) for some in (shared, shared[::-1])
    )
    assert one is not None
    assert other is not None
    assert one() == other()
    assert digests(whole, key=8)[0] != digests(whole)[0]


def model_bytes(whole: PersistentSources) -> int:
    return sum(one.tensor.nbytes for one in whole.sources)


class Smp:
    """The command page, and the answers to a rank."""

    def __init__(self, *answers: tuple[Rank, ...] | None, restored: tuple[Rank, ...] = ()) -> None:
        fd = create_command_page()
        self.page = SharedPage(fd)
        os.close(fd)
        self.answers = list(answers)
        self.asked: list[tuple[Rank, ...]] = []
        settings = SimpleNamespace(share_replicas=True)
        context: Any = SimpleNamespace(rank=Rank(4), commands=self.page, settings=settings)
        link: Any = self
        self.shares = ReplicaShares(context, link, restored=restored)
        self.whole, self.model = trained()

    def request_shares(self, _key: int, members: tuple[Rank, ...]) -> tuple[Rank, ...]:
        self.asked.append(members)
        answer = self.answers.pop(0)
        if answer is None:
            raise PeerLost(peer="the SMP")
        return answer

    def stored(self, decision: int) -> tuple[Rank, ...] | None:
        """What the check of the next boundary states as members; None: no check."""
        self.page.set(CommandField.REPLICA_SHARES, decision)
        cut = self.shares.cut(BoundaryState(self.whole, (), b""), ())
        check = self.shares.check(DeviceCopies(()))()
        assert cut.persistent.members == (tuple(check.members) if check else ())
        return None if check is None else tuple(map(Rank, check.members))


def test_a_rank_without_an_answer_stores_whole_tensors_and_asks_again() -> None:
    smp = Smp(None, MEMBERS)
    assert smp.stored(0) is None
    assert smp.stored(1) == ()
    assert smp.stored(1) == MEMBERS
    assert smp.asked == [(), ()]


def test_members_stay_valid_while_the_smp_is_away_and_end_with_the_sharing() -> None:
    smp = Smp(MEMBERS, None)
    assert smp.stored(1) == MEMBERS
    assert smp.stored(2) == MEMBERS
    assert smp.stored(-1) is None


def test_the_members_of_a_restored_shard_are_asked_for_once() -> None:
    smp = Smp(None, MEMBERS, restored=MEMBERS)
    assert smp.stored(0) is None
    assert smp.stored(1) == MEMBERS
    assert smp.asked == [MEMBERS, ()]


def test_a_rank_that_keeps_whole_tensors_still_states_checks() -> None:
    smp = Smp(MEMBERS)
    assert smp.stored(1) == MEMBERS
    assert smp.shares.keep_whole()
    assert not smp.shares.keep_whole()
    assert smp.stored(1) == smp.stored(2) == ()


def test_an_error_leaves_whole_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    smp = Smp(MEMBERS)
    monkeypatch.setattr("ftrun.worker.replicas.shares.shares_of", lambda *_: 1 // 0)
    assert smp.stored(1) is None
    assert smp.stored(1) is None
