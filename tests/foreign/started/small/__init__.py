"""A package whose training module imports its neighbour relatively and reads a YAML file that lies beside it."""
