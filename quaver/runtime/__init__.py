"""Helpers of all layers: phases, devices, ranks, compilation and slow paths of the process; names, errors and files."""
