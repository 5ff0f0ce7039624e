"""Tables, pages and files that the command line writes."""
