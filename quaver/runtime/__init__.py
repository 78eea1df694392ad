"""What every layer may ask of the process: phases, devices, ranks, compilation, slow paths; names, errors and files."""
