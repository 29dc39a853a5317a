"""The command `steelyard`: parses, calls one function, prints. Decides nothing."""
