"""The files of a run: its folder, lock, records, checkpoints and their manifests, and the safe reading of them."""
