"""The device of a prediction: an NVIDIA GPU that this machine lacks, or a CPU with its process group's buffers."""
