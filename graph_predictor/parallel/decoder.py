"""The decoder behind a workload of the suite: its ``TransformerShape``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graph_predictor.parallel.collective_times import PlanError
from tracer.shape_only.transformer import TransformerShape

DECODERS = ("llama", "gpt2", "moe")
"""Workloads whose layers can be split over ranks and stages."""


def decoder_of(name: str, settings: Mapping[str, Any]) -> TransformerShape:
    """The decoder of a workload by its settings, as plain values.

    Raises:
        PlanError: the workload is no decoder, or a setting is missing.
    """
    if name not in DECODERS:
        raise PlanError(f"The workload {name} is no decoder, so that how to split its layers is not known; plans are "
                        f"made for {', '.join(DECODERS)}.")
    try:
        dtype = next((kind for kind in ("bf16", "fp16") if kind in str(settings["dtype"])), "fp32")
        plain = name == "gpt2"
        return TransformerShape(
            layers=int(settings["depth"]), hidden=int(settings["width"]), heads=int(settings["heads"]),
            kv_heads=int(settings["heads" if plain else "kv_heads"]),
            ffn=4 * int(settings["width"]) if plain else int(settings["hidden"]), vocab=int(settings["vocabulary"]),
            seq=int(settings["seq"]), gated=not plain, rms=not plain, bias=plain, rotary=not plain,
            dropout=float(settings.get("dropout", 0.0)), experts=int(settings.get("experts", 0)),
            top_k=int(settings.get("top_k", 0)), dtype=dtype)
    except (KeyError, TypeError, ValueError) as error:
        raise PlanError(f"The settings of {name} lack or spoil {error}; trace or capture it again.") from None
