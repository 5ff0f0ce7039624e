"""What agents and SMPs of different nodes send to each other; the plan of a generation."""
