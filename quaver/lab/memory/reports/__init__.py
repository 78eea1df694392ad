"""Reports predictions: the differences of two runs, hints, and the HTML page."""
