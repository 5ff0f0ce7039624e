"""`ftrun render`: a Slurm script, a JobSet or a TrainJob."""
