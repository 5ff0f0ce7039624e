"""One incident: grouping of journal lines, timeline, ranks, page."""
