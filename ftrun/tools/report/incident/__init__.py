"""incident."""
