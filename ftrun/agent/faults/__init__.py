"""Injects faults on order into a run that was started with `--allow-faults`."""
