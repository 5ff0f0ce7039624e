"""DECISION: the agent that leads: failure detection, reconfiguration, plans."""
