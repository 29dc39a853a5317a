"""What `steelyard check` runs: whether a model, its data and its loss give the same numbers on any number of ranks."""
