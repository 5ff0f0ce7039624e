"""`ftrun network`: the paths between a run's nodes as text, picture and JSON."""
