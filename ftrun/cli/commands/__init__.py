"""Commands that query or change a run: status, stop, profiles, preflight, inject-fault."""
