"""Formats that may not change by accident, compared with recorded files."""
