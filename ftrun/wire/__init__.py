"""The only way between processes."""
