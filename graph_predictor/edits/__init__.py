"""Edits: changes of a step, one file each. Edits with an option of their own are listed in ``registry``."""
