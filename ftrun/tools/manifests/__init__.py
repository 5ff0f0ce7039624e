"""`ftrun manifest`: a Slurm batch script, a JobSet or a TrainJob."""
