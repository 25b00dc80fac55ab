"""Exports: simulated jobs and tables of results in the formats of other programs."""
