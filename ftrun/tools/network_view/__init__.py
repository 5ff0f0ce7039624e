"""network_view."""
