"""The needs and the time of a run on a cluster, and the files that start it: `quaver plan`."""
