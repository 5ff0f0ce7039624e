"""The agent's side of the SMP, and the memory and state that the next agent receives."""
