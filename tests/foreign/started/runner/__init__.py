"""A package that is run itself: python -m runner."""

DEFAULT_BATCH = 8
