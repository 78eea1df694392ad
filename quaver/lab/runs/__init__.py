"""How a run survives: its folder, lock, checkpoints and their manifest, and the safe reading of them."""
