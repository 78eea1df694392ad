"""Process state that every layer may read: phases, devices, ranks, compilation, slow paths; and module names."""
