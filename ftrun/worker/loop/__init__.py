"""`session.steps`, `epochs` and `batches`: loops that resume at the restored step."""
