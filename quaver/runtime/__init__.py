"""State of the process that every layer may read: its phase, device, ranks, compiler, slow paths; names of modules."""
