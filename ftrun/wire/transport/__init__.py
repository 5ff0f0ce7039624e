"""Sockets, framing, authentication."""
