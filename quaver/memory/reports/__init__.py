"""Shows what was recorded: rows, comparisons, pictures, a page."""
