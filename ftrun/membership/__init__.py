"""DECISION: consensus on members and leader. These modules run on every agent."""
