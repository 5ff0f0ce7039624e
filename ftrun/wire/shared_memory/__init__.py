"""Arenas, heartbeat and command pages, parity regions."""
