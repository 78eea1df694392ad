"""Float8 recipes in plain PyTorch: formats, configs, scales, and a reference of the three matmuls."""
