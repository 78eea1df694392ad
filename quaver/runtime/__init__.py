"""What every layer may ask of the process: its phase, device, ranks, compiler, and slow paths."""
