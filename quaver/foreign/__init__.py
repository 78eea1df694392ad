"""Recognizes objects of other libraries without importing them; one file per library."""
