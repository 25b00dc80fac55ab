"""Edits: what could be different about a step, one file each; those that an option names are in ``registry``."""
