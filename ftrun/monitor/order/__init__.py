"""Pure: the order in which ranks call collectives and messages, and cycles of waits."""
