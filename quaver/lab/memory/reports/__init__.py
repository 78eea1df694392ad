"""Comparisons, hints and the HTML page."""
