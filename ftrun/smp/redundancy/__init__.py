"""Protection of a version by other nodes: mirrors and parity."""
