"""Separate programs that the command line starts; nothing imports them."""
