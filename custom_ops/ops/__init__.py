"""The operators: <operator>.def states one, <operator>.py beside it is its float64 reference."""
