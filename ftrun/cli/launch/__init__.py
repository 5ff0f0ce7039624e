"""Turns a command line into a run specification: torchrun's flags, profiles, nodes, Slurm."""
