"""Follows every storage of a step, from allocation to release, and says what each is for."""
