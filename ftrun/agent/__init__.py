"""PROCESS: one per node; starts, observes and executes. Makes no decision about the run."""
