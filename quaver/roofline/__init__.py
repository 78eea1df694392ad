"""What float8 would gain: a cost model of linears on known devices, and the filter that reads it."""
