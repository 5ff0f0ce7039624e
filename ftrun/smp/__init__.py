"""PROCESS: the snapshot management process; outlives its workers and agent; never imports torch."""
