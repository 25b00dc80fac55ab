"""The difference of two recorded steps, attributed to what the programs and the machines did differently."""
