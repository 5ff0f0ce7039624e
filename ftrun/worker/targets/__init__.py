"""Where a snapshot is copied to: a slot of the arena, or the capture pool."""
