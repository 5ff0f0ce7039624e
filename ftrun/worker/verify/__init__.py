"""What `ftrun verify` records inside a rank."""
