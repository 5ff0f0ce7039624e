"""PROCESS: the snapshot manager; outlives its workers and its agent. Never imports torch."""
