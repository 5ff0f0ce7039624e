"""What processes of one node send to each other."""
