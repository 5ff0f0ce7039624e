"""DECISION: which ways nodes have to each other, which of them are used, and by whom. Pure."""
