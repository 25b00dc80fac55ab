"""Serving of a decoder: prices of its steps, and what the requests of a load get from a server."""
