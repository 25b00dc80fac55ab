"""Embedding tables and what is looked up in them: descriptions, reuse of rows, and the files both come from."""
