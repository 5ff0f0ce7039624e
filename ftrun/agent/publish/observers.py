"""Observers of a run: status, progress log, Prometheus metrics, hooks and `network.json`.

Runs in:  agent, main thread; observers that may block have threads of their own.
Takes in: the run, at each turn of its loop; the lines of this node's journal.
Gives:    `Pulse` lines, /metrics, incident reports to commands and webhooks, `network.json`.
Survives: all failures of observers; they do not affect the run.
"""

import ipaddress
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftrun.agent.publish.hooks import Hooks
from ftrun.agent.publish.incident_status import lateness_of
from ftrun.agent.publish.kept_network import NetworkFile
from ftrun.agent.publish.pulse import ProgressLog
from ftrun.agent.publish.run_figures import RunMetrics
from ftrun.agent.publish.run_view import RunView
from ftrun.agent.publish.status import StatusDesk

if TYPE_CHECKING:
    from ftrun.agent.publish.metrics_server import MetricsServer

_log = logging.getLogger("ftrun")


class Observers:
    """All observers of one agent."""

    def __init__(self, run: RunView) -> None:
        self.status = StatusDesk(run)
        self._run = run
        self._node_id = run.brain.member.me.node_id
        self._pulse = ProgressLog(run.journal, run.workers)
        self._figures = RunMetrics(run)
        self._hooks = Hooks(
            run.spec.profile.hooks, run.journal, facts=self._facts, cwd=run.spec.cwd
        )
        brain = run.desk.brain if run.desk is not None else None
        self._network = NetworkFile(brain, Path(run.spec.log_folder))
        self._server: MetricsServer | None = None
        run.journal.watch(self._figures.take)
        run.journal.watch(self._hooks.take)
        run.journal.watch(self._network.take)

    @property
    def metrics_address(self) -> str | None:
        return self._server.address if self._server is not None else None

    def start(self) -> None:
        settings = self._run.spec.profile.metrics
        if not settings.port:
            return
        # Imported here, because the library costs memory and some milliseconds, and most runs do
        # not use it.
        from ftrun.agent.publish.metrics import RunCollector, text_of
        from ftrun.agent.publish.metrics_server import MetricsServer, read_token

        where = f"{settings.host} port {settings.port}"
        collector = RunCollector(self._status, self._figures.copy)
        try:
            token = read_token(settings.token_file) if settings.token_file else None
            self._server = MetricsServer(
                settings.host, settings.port, text=lambda: text_of(collector), token=token
            )
        except (OSError, ValueError) as error:
            self._run.journal.write("no_metrics", why=f"{where}: {error}")
            _log.warning("no metrics are served at %s: %s", where, error)
            return
        self._server.start()
        if token is None and not _is_loopback(settings.host):
            _log.warning(
                "whoever reaches %s can read the metrics; metrics.token_file names a token", where
            )

    def look(self, now_s: float) -> None:
        """Update all observers; called once per turn of the loop."""
        self.status.look(now_s)
        self._figures.look(now_s=now_s)
        self._pulse.look(lateness_of(self._run.brain), now_s=now_s)

    def at_end(self) -> None:
        """Write the last values; called when the ranks have ended and their pages still exist."""
        self._pulse.write(lateness_of(self._run.brain))
        self._network.keep()

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self._hooks.close()

    def _status(self) -> dict[str, Any]:
        """Status of this node; of the whole run on the leader. Sends no request. Any thread."""
        return {**self.status.of_node(), "node": self._node_id}

    def _facts(self) -> dict[str, object]:
        run = self._run
        return {
            "run_id": run.spec.run_id,
            "script": run.spec.script,
            "node": self._node_id,
            "generation": run.generations.number,
        }


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
