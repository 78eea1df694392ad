"""The lab: what trains with the library, measures, predicts and plans. The library imports nothing of it."""
