"""Sharding of embedding tables over ranks: plans, what a step under one costs, and the search for the fastest."""
