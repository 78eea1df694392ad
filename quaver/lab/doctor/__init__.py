"""What `quaver doctor` finds out: what a machine, a GPU and a model's layers gain from float8."""
