"""slow."""
