"""Reports: what a person shall see of a recorded or predicted step."""
