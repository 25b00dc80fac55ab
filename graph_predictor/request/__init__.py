"""Requests: a source and a configuration in, a prediction out."""
