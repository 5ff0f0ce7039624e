"""A restore: shards from memory, from other nodes, or rebuilt from parity."""
