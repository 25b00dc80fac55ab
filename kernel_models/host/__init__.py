"""Host overheads: what the CPU costs between, before, within and after a step's operations."""
