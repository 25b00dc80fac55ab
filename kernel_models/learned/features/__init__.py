"""Recipes: from the columns of a family's calls to features and a baseline, each feature with a physical meaning.

A recipe gives ``Described``: features [n, f] and the time of a simple formula [n], µs; trees learn the logarithm of the
measured time over that baseline. ``RECIPES`` names them; a stored model keeps the name, so a recipe that changes what
its features mean takes a new name.
"""

from __future__ import annotations

from kernel_models.learned.features.attention import attention_brief, attention_features
from kernel_models.learned.features.gemm import gemm_brief, gemm_features
from kernel_models.learned.features.recipe import Described, Figures, Recipe
from kernel_models.learned.features.streaming import streaming_features
from kernel_models.op_call import Family

RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in (
    Recipe("gemm-1", gemm_features), Recipe("gemm-brief-1", gemm_brief),
    Recipe("attention-1", attention_features), Recipe("attention-brief-1", attention_brief),
    Recipe("streaming-1", streaming_features, work=True),
)}
"""Every recipe by name."""


def recipes_of(family: Family) -> tuple[str, str]:
    """The names of a family's recipe and of its brief one, for the distilled model."""
    if family is Family.GEMM:
        return "gemm-1", "gemm-brief-1"
    if family is Family.ATTENTION:
        return "attention-1", "attention-brief-1"
    return "streaming-1", "streaming-1"


__all__ = ["RECIPES", "Described", "Figures", "Recipe", "recipes_of"]
