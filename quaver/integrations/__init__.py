"""Integrations of quaver into other trainers. Each file imports its library when it is imported."""
