"""Lets torch.compile make code without kernels, and follows the buffers of that code."""
