"""`session.steps`, `epochs` and `batches`: loops that resume where they ended."""
