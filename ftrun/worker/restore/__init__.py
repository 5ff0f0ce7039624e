"""Restore: reads shards from memory into tensors."""
