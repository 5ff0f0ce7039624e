"""redundancy."""
