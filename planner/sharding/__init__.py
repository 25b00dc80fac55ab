"""Sharding of embedding tables over ranks: plans, the step of a plan, and the search for the fastest plan."""
