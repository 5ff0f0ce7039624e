"""The lines of the journal: one frozen struct for each kind, shared by its writers and readers."""
