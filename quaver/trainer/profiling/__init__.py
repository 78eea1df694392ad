"""Traces and memory of single steps."""
