"""DECISION: stragglers, slow links and trends, and the collective check of new nodes."""
