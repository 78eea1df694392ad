"""Follows every storage of a training step from allocation to release, and says what each is for.

The trainer's peak and snapshots (`quaver.trainer`) and the memory tool (`quaver.memory`) use it.
"""
