"""PROCESS: the operator's terminal, and the stub that the started process becomes."""
