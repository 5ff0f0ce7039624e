"""Notices that this node will be taken away: from clouds, schedulers, files and commands."""
