"""PROCESS: one per node; starts, watches, carries out. Decides nothing."""
