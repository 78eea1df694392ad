"""Follows every storage of a training step from allocation to release, and says what each is for.

The trainer's peak and snapshots (`quaver.lab.trainer`) and the memory tool (`quaver.lab.memory`) use it.
"""
