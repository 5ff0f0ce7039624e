"""Starts the ranks of one generation, through torch's elastic launcher."""
