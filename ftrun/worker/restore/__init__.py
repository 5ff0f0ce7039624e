"""Restore: shards are read from memory or disk into tensors."""
