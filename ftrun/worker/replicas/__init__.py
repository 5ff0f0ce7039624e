"""Replicas: each rank stores a share of the tensors that all ranks of a node hold."""
