"""PROCESS: one per node; starts, observes and executes. It makes no decisions about the run."""
