"""`ftrun drill`: a job, faults one after another, and a verdict on each."""
