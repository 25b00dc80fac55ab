"""Edits: what could be different about a recorded step. Each is a small class that documents what it assumes."""

