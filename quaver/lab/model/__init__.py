"""The reference model: a Llama, dense or with experts, its loss, initial weights, FLOPs, float8 layers and parallelism.

Read llama.py first. float8 and parallelize change a model in place, each by its section of the settings.
"""
