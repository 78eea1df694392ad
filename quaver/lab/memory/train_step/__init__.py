"""The memory and the collectives of a step of the trainer: predicted, and measured."""
