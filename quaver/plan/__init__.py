"""What a run on a cluster needs and takes, and the files that start it: `quaver plan`."""
