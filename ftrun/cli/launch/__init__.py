"""From a command line to a run specification: torchrun's flags, profiles, nodes, Slurm."""
