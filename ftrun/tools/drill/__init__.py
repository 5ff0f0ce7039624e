"""`ftrun drill`: runs a job, injects faults one after another, and judges each result."""
