"""The agent's side of the SMP, and the memory that it hands to its successor."""
