"""Commands that ask or change a run: status, stop, profiles, preflight, inject-fault."""
