"""Pure: which snapshots exist, what each holds, and how it is protected."""
