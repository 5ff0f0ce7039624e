"""One agent's view of the witness: whether it is reachable, and what it remembers.

Runs in:  every agent. Pure.
Takes in: its answers, and failures to answer.
Gives:    requests; how long it has been reachable or unreachable; a line when that changes.
Survives: the witness: training does not need it, see witness.py.

Rule 1: a confirmation of the witness counts from the time of the request, not of the answer.
Rule 2: it counts as unreachable from the first request that it does not answer.
"""

from ftrun.membership.events import WitnessAnswered
from ftrun.membership.witness import WitnessRegister
from ftrun.recovery.commands import Command, JournalEntry, QueryWitness, WitnessOperation
from ftrun.wire.cluster.generation import GenerationPlan, NodeCard

_LONG_AGO_S = -1e9


class WitnessView:
    """One agent's view of the witness; never reachable in a run without a witness."""

    def __init__(self, *, is_used: bool = False) -> None:
        self.is_used = is_used
        self.lead: NodeCard | None = None
        """The agent whose lease is valid, by the newest answer."""
        self.register: WitnessRegister | None = None
        """The register, by the newest answer."""
        self.why = ""
        """Why it is unreachable; empty if it is reachable or no answer is known yet."""
        self.since_s = 0.0
        """Time since which it has been reachable, or unreachable."""
        self._is_reached = False
        self._asked_s = self._held_s = _LONG_AGO_S

    @property
    def is_reached(self) -> bool:
        return self._is_reached

    @property
    def life(self) -> int:
        """Incarnation of its register; 0: unknown."""
        return self.register.life if self.register is not None else 0

    def ask(
        self,
        wish: WitnessOperation,
        *,
        generation: int = -1,
        plan: GenerationPlan | None = None,
        begins: bool = False,
        now_s: float,
    ) -> list[Command]:
        return [QueryWitness(wish, now_s, generation, plan, begins)] if self.is_used else []

    def say_who_leads(self, plan: GenerationPlan, *, now_s: float) -> list[Command]:
        """Reports the chosen plan of this leader, or renews its lease."""
        known = self.register
        is_told = known is not None and known.plan is not None
        edition = known.plan.edition if known is not None and known.plan is not None else (-1, 0)
        if is_told and edition >= plan.edition:
            return self.ask(WitnessOperation.KEEP, generation=plan.generation, now_s=now_s)
        return self.ask(WitnessOperation.TELL, generation=plan.generation, plan=plan, now_s=now_s)

    def said(self, event: WitnessAnswered, *, now_s: float) -> list[Command]:
        """Records an answer; returns a line when reachability changes."""
        if event.asked.asked_s < self._asked_s:
            return []  # a later request was answered before
        self._asked_s = event.asked.asked_s
        if not event.is_reached:
            is_news = self._is_reached or not self.why
            self._is_reached, self.why = False, event.why
            if not is_news:
                return []
            self.since_s = now_s
            text = f"{event.why}; training goes on, and no tie is broken meanwhile"
            return [JournalEntry("WitnessLost", text, say=True)]
        self.register, self.lead = event.register, event.lead
        if event.granted and event.asked.wish in (
            WitnessOperation.KEEP,
            WitnessOperation.PROMISE,
            WitnessOperation.TELL,
        ):
            self._held_s = max(self._held_s, event.asked.asked_s)
        if self._is_reached:
            return []
        was_away, away_s = self.why, now_s - self.since_s
        self._is_reached, self.why, self.since_s = True, "", now_s
        if not was_away:
            return []
        text = f"the witness is reached again, after {away_s:.1f} s"
        return [JournalEntry("WitnessBack", text, say=True)]

    def holds(self, life: int, limit_s: float, *, now_s: float) -> bool:
        """Whether it promises no other proposer anything for at least `limit_s` after a request."""
        return life == self.life and now_s - self._held_s < limit_s

    def has_been_there(self, for_s: float, *, now_s: float) -> bool:
        return self._is_reached and now_s - self.since_s >= for_s

    def has_been_away(self, for_s: float, *, now_s: float) -> bool:
        return bool(self.why) and now_s - self.since_s >= for_s
