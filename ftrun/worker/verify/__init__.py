"""Recordings of `ftrun verify` inside a rank."""
