"""Handwritten journals in the format of agents, for tests of the report.

Recorded journals are in tests/unit/cli/journals. These cover situations that a small machine cannot
record: hundreds of ranks, days of training, malicious text.
"""

import json
from typing import Any

from ftrun.records.decode import decode

START_S = 1_795_000_000.0
STACK = [
    "/usr/lib/python3.11/threading.py:359 in wait",
    "/home/me/model.py:214 in forward",
    "/venv/lib/python3.11/site-packages/torch/nn/modules/module.py:1773 in _call_impl",
    "/home/me/train.py:88 in train_one",
    "/home/me/train.py:131 in main",
]
WAITING = [
    "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py:2941 in all_reduce",
    "/home/me/train.py:92 in train_one",
    "/home/me/train.py:131 in main",
]


class MadeJournal:
    """Lines in sequence; `t` is the time since the run began."""

    def __init__(self, *, run_id: str = "big-1", ranks: int = 8, nodes: int = 2) -> None:
        self.ranks = ranks
        self.nodes = [f"node{number}" for number in range(nodes)]
        self.per_node = ranks // nodes
        self.entries: list[dict[str, Any]] = []
        self.run_id = run_id
        self.generation = 0
        self.incidents = 0

    def put(self, t: float, kind: str, *, node: str | None = None, **fields: Any) -> None:
        name = self.nodes[0] if node is None else node
        number = self.nodes.index(name) if name in self.nodes else 0
        line = {"time": START_S + t, "monotonic_s": 5000.0 * (number + 1) + t, "node": name,
                "kind": kind, **fields}  # fmt: skip
        assert decode(json.dumps(line).encode()) is not None, line
        self.entries.append(line)

    def ranks_of(self, node: str) -> list[int]:
        first = self.nodes.index(node) * self.per_node
        return list(range(first, first + self.per_node))

    def begin(self) -> None:
        for node in self.nodes:
            self.put(0.0, "run_started", node=node, run_id=self.run_id, script="/home/me/train.py",
                     torch="2.13.0+cu128", logs="")  # fmt: skip
        self.put(1.0, "ballot_started", text="the run begins", generation=0)
        self.start(4.0, "the run begins", None)
        self.put(21.0, "lifecycle_changed", incident=None, old="check", new="run",
                 text="every rank has made a step")  # fmt: skip

    def start(self, t: float, reason: str, restored: dict[str, int] | None) -> None:
        text = f"generation {self.generation}: {len(self.nodes)} nodes, {self.ranks} ranks"
        self.put(t, "generation_chosen", text=text, reason=reason, generation=self.generation,
                 world_size=self.ranks, restored=restored and [*restored.values()],
                 restore_reason="the newest")  # fmt: skip
        for number, node in enumerate(self.nodes):
            pids = [1000 + rank for rank in self.ranks_of(node)]
            self.put(t + 0.002 * number, "generation_started", node=node, reason=reason,
                     generation=self.generation, restored=restored, pids=pids)  # fmt: skip

    def pulse(self, t: float, step: int, *, blocked_s: float = 0.0, taken: int = 0) -> None:
        for node in self.nodes:
            rows = [[rank, step, 0.001] for rank in self.ranks_of(node)]
            self.put(t, "progress", node=node, step=step, steps_here=step, p50_s=0.25, p99_s=0.31,
                     blocked_s=blocked_s, taken=taken, skipped=1, discarded=0,
                     committed=[self.generation, step - 1], loss=2.1304, ranks=rows)  # fmt: skip

    def view(self, rank: int, step: int, unresponsive_s: float, *, waits: bool) -> dict[str, Any]:
        calls = [{"seq": 41206, "op": "all_reduce", "sizes": "[1048576]"}]
        if waits:
            calls.append({"seq": 41207, "op": "all_reduce", "sizes": "[1048576]"})
        group = {"name": "0", "desc": "default_pg", "ranks": [], "calls": calls,
                 "waits_seq": 41207 if waits else 0, "waits_s": unresponsive_s - 0.2}  # fmt: skip
        return {"rank": rank, "pid": 1000 + rank, "process": "S", "step": step,
                "unresponsive_s": unresponsive_s, "phase": "", "has_stepped": True,
                "is_finished": False,
                "cpu": 0.0 if waits else 1.0, "still_s": 0.0 if waits else unresponsive_s,
                "spins_s": 0.0, "holds_gil": False, "groups": [group],
                "stack": WAITING if waits else STACK, "blocked_in": "", "child": ""}  # fmt: skip

    def hang(self, t: float, step: int, culprit: int, **extra: Any) -> None:
        """Twelve seconds without an answer, a verdict, and a restart of all ranks."""
        self.incidents += 1
        number = self.incidents
        node = self.nodes[culprit // self.per_node]
        others = [rank for rank in range(self.ranks) if rank != culprit]
        text = (f"rank {culprit} on {node} stopped answering at step {step:,} while {len(others)} "
                "ranks waited in all_reduce #41,207")  # fmt: skip
        self.put(t + 12.1, "lifecycle_changed", incident=number, old="run", new="suspect",
                 text="silent")  # fmt: skip
        self.put(
            t + 12.1,
            "suspicion_raised",
            incident=number,
            ranks=list(range(self.ranks)),
            unresponsive_s=12.1,
            deadline_s=12.0,
            text="no step for 12.1 s; a hang is suspected",
        )
        verdict = {"kind": "hang in computation", "culprits": [culprit], "nodes": [node],
                   "victims": others, "text": text, "confidence": "certain",
                   "act_immediately": True,
                   "evidence": [f"{len(others)} ranks have entered all_reduce #41,207 of "
                                f"default_pg, rank {culprit} has not",
                                f"rank {culprit} has used no processor for 11.9 s",
                                "its stack is the same in 3 looks: model.py:214 in forward"],
                   "counter_evidence": [f"the link of {node} works: heartbeats come"],
                   "fingerprint": "hang model.py forward", **extra}  # fmt: skip
        views = [self.view(rank, step, 12.4 + rank % 7 / 50, waits=rank != culprit)
                 for rank in range(self.ranks)]  # fmt: skip
        self.put(t + 12.55, "verdict", incident=number, verdict=verdict, ranks=views, text=text)
        self.put(t + 12.56, "action_taken", incident=number, action="kill", text="evidence")
        self.recover(t + 12.56, text, step, number)
        restored_s = 12.56 + 0.47
        self.put(t + restored_s + 0.3, "incident_closed", incident=number, text=text,
                 verdict_kind="hang in computation", culprits=[culprit], nodes=[node],
                 open_s=13.4, detected_s=12.55, recovered_s=0.48, steps_lost=1, restored=step - 1,
                 verified={"progress": True, "loss": "continuous"}, action="respawn",
                 actions=["kill", "respawn"])  # fmt: skip

    def recover(self, t: float, reason: str, step: int, incident: int | None) -> None:
        """From the kill to the first steps, on all nodes."""
        self.generation += 1
        self.put(t, "ballot_started", text=reason, generation=self.generation)
        for node in self.nodes:
            exits = [{"rank": rank, "kind": "signal", "code": -9,
                      "text": f"rank {rank} was killed by SIGKILL"}
                     for rank in self.ranks_of(node)]  # fmt: skip
            self.put(t + 0.001, "workers_killed", node=node, reason=reason)
            self.put(
                t + 0.03,
                "workers_exited",
                node=node,
                exits=exits,
                progress={"step": step, "steps_here": step, "attached": True},
            )
        if incident is not None:
            self.put(t + 0.03, "action_taken", incident=incident, action="respawn", text=reason)
        restored = {"generation": self.generation - 1, "step": step - 1}
        self.start(t + 0.05, reason, restored)
        for number, node in enumerate(self.nodes):
            mono_s = 5000.0 * (number + 1) + t
            phases = {"decide": 0.004, "stop": 0.028, "fork": 0.031, "rendezvous": 0.060,
                      "build": 0.101, "restore": 0.062,
                      "first_step": 0.151 + 0.01 * number}  # fmt: skip
            self.put(t + 0.5, "recovered", node=node, generation=self.generation, cause=reason,
                     noticed_s=mono_s, stopped_s=mono_s + 0.028, decided_s=mono_s + 0.032,
                     launched_s=mono_s + 0.05, restored=restored, phases_s=phases)  # fmt: skip

    def crash(self, t: float, step: int, rank: int) -> None:
        """A rank ends by itself, and no line has the number of an incident."""
        node = self.nodes[rank // self.per_node]
        text = f"rank {rank} (pid {1000 + rank}) was killed by SIGSEGV"
        self.put(t, "workers_exited", node=node,
                 exits=[{"rank": rank, "kind": "signal", "code": -11, "text": text}],
                 progress={"step": step, "steps_here": step, "attached": True})  # fmt: skip
        self.recover(t + 0.001, text, step, None)

    def slow_link(self, t: float, step: int) -> None:
        """Reported, without an action; with the matrix."""
        self.incidents += 1
        a, b = self.nodes[1], self.nodes[2]
        text = f"the link from {a} to {b} is slow: 81 ms for a megabyte, the others take 9 ms"
        verdict = {"kind": "slow communication", "culprits": [], "nodes": [a, b], "victims": [],
                   "text": text, "evidence": ["a probe between the two agents took 84 ms"],
                   "counter_evidence": [], "confidence": "likely", "act_immediately": False,
                   "fingerprint": "link"}  # fmt: skip
        cells = [{"sender": x, "receiver": y, "s_per_mb": 0.081 if (x, y) == (a, b) else 0.009,
                  "rtt_s": 0.0004, "busy_share": 0.4, "times_slower": 1.0,
                  "is_hot": (x, y) == (a, b)}
                 for x in self.nodes for y in self.nodes if x != y]  # fmt: skip
        self.put(t, "verdict", incident=self.incidents, verdict=verdict, text=text, ranks=[],
                 matrix=cells)  # fmt: skip
        self.put(t, "action_taken", incident=self.incidents, action="report", text=text)

    def end(self, t: float, *, exit_code: int = 0, reason: str = "every rank has finished") -> None:
        for node in self.nodes:
            self.put(t, "run_end_decided", node=node, exit_code=exit_code, reason=reason)
            self.put(t + 0.01, "run_ended", node=node, exit_code=exit_code)

    def raw(self) -> list[bytes]:
        return [json.dumps(entry).encode() + b"\n" for entry in self.entries]


def long_run(*, ranks: int = 8, nodes: int = 2) -> MadeJournal:
    """Two hours with a crash, a hang and a slow link."""
    made = MadeJournal(ranks=ranks, nodes=nodes)
    made.begin()
    for minute in range(120):
        step = 156 + 240 * minute
        made.pulse(60.0 + 60 * minute, step, blocked_s=0.4 * minute, taken=24 * minute)
    made.crash(1500.3, 5918, 1)
    made.entries = [one for one in made.entries if not 4000 < one["time"] - START_S < 4030]
    made.hang(4000.0, 15916, culprit=3)
    made.put(5000.0, "checkpoint_written", generation=2, step=19000, path="/data/c", total_bytes=5,
             seconds=1.0)  # fmt: skip
    if nodes > 2:
        made.slow_link(6000.0, 23000)
    made.end(7230.0)
    made.entries.sort(key=lambda one: one["time"])
    return made
