"""A library of models with a registry, as timm's: models register themselves when the package is imported."""

from .factory import create_model
from .small_net import small_net

__all__ = ["create_model", "small_net"]
