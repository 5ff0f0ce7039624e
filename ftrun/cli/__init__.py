"""PROCESS: the command line, and the stub that the started process becomes."""
