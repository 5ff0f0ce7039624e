"""shared_memory."""
