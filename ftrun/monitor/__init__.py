"""DECISION: from observations to a verdict: what is wrong, and which rank or node causes it."""
