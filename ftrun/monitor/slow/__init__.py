"""DECISION: stragglers, slow links and trends."""
