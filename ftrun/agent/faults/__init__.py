"""Faults that are injected on order into a run started with `--allow-faults`."""
