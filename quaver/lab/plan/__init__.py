"""`quaver plan`: estimates the memory and the time of a run on a cluster, and writes the files that start it."""
