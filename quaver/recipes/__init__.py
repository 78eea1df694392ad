"""What float8 training computes, in plain PyTorch: formats, configs, scales, and the reference."""
