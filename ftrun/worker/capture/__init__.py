"""Snapshots: boundaries, copies, slots."""
