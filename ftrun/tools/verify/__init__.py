"""`ftrun verify`: compares a script's undisturbed run with runs in which ranks are killed."""
