"""HTML pages and SVG charts."""
