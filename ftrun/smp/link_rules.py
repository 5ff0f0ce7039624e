"""Decides when a link redials, when its node counts as lost, and which links a session admits.

Runs in:  the SMP, in the threads of the links. Pure: time is an argument.
Takes in: the outcome of a connection, or of an attempt to connect.
Gives:    pauses, and reasons to report.

Rule 1: a fetch link whose connection is lost redials before its node is reported lost. The node is
        lost if it refuses the new connection or accepts none within the patience.
Rule 2: a protect link reports each lost connection, because the data in flight is lost.
Rule 3: a session admits links of its own generation. It admits protect links only of its own group.
        A link of an older generation is rejected. Any other link waits.
"""

from ftrun.wire.cluster.transfer import LinkHello

PROTECT, FETCH = "protect", "fetch"
"""Purposes of a link."""

FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0
_BRIEF_S = 0.1
"""A peer of another generation ends a connection within this time. A reset in the network comes
later, and no growing pause follows it."""


class LinkRules:
    """The state of one link.

    Args:
        dials_again_first: redial before the node is reported lost (rule 1).
        patience_s: time without a connection after which the node is reported lost.
    """

    def __init__(self, *, dials_again_first: bool, patience_s: float) -> None:
        self.dials_again_first = dials_again_first
        self.is_lost = False
        """The node was reported lost, and no connection was made since then."""
        self._patience_s = patience_s
        self._times = 0
        self._connected_s = 0.0
        self._rest_s = self._pause_s = FIRST_PAUSE_S
        self._report_s = 0.0
        self._reported = ""

    def begin_dialing(self, now_s: float) -> None:
        self._report_s = now_s + self._patience_s
        self._pause_s = FIRST_PAUSE_S
        self._reported = ""

    def dial_failed(
        self, reason: str, *, is_refused: bool, is_turned_away: bool, now_s: float
    ) -> str:
        """Handle a failed attempt to connect.

        Args:
            reason: text for the report.
            is_refused: no process listens at the address.
            is_turned_away: another process than the expected one listens at the address.
            now_s: the present time.

        Returns:
            The reason if the node is to be reported lost now, else an empty string.
        """
        is_gone = is_refused and self._times > 0 and self.dials_again_first
        is_final = is_gone or is_turned_away or now_s > self._report_s
        if not is_final or reason == self._reported:
            return ""
        self._reported, self.is_lost = reason, True
        return reason

    def pause_s(self) -> float:
        """Seconds until the next attempt to connect; each call doubles them, up to 1 s."""
        pause_s = self._pause_s
        self._pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return pause_s

    def connected(self, now_s: float) -> bool:
        """Return whether an earlier connection was lost or the node was reported lost."""
        self._times += 1
        was_lost, self.is_lost = self.is_lost, False
        self._connected_s = now_s
        return self._times > 1 or was_lost

    def disconnected(self, reason: str) -> str:
        """Return the reason if the node is to be reported lost now, else an empty string."""
        if self.dials_again_first:
            return ""
        self.is_lost = True
        return reason

    def rest_s(self, now_s: float) -> float:
        is_brief = now_s - self._connected_s < _BRIEF_S
        self._rest_s = min(2 * self._rest_s, _LONGEST_PAUSE_S) if is_brief else FIRST_PAUSE_S
        return self._rest_s


def admits(hello: LinkHello, *, generation: int, session: int) -> bool | None:
    """Whether a link belongs to the running session; None if it may be of a later one (rule 3)."""
    if hello.generation < generation:
        return False
    if hello.generation > generation:
        return None
    return True if hello.purpose == FETCH or hello.session == session else None
