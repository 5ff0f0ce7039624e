"""DECISION: paths between nodes: which exist, which are used, when that changes. Pure."""
