"""Where checkpoints are stored: a local directory or a URL."""
