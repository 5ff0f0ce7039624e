"""DECISION: what probes found: rails, leaf switches, dead and slow paths."""
