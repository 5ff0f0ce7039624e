"""Ranks that keep their process when another rank fails: groups, set-up alone, transient state."""
