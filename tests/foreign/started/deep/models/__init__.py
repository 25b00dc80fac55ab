from .blocks import Stack

__all__ = ["Stack"]
