"""Arenas with snapshots, seals and commits, and the parity store."""
