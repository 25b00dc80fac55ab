"""The decoder behind a workload of the suite: its ``TransformerShape``, and whether a plan fits it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graph_predictor.sizes.named_sizes import MOST
from kernel_models.collectives import Topology
from planner.parallel.stages import spread
from tracer.errors import reason_of
from tracer.parallel_plan import ParallelPlan, PlanError
from tracer.shape_only.transformer import TransformerShape
from tracer.workloads.settings import PRESETS

DECODERS = ("llama", "gpt2", "moe")
"""Workloads whose layers can be split over ranks and stages."""

_LLAMA = {"dtype": "bf16", "batch": "1", "kv_heads": "8", "vocabulary": "128256", "seq": "8192"}
_GPT = {"dtype": "bf16", "batch": "1", "vocabulary": "50257"}
PUBLISHED: dict[str, dict[str, dict[str, str]]] = {
    "llama": {
        "8b": {**_LLAMA, "depth": "32", "width": "4096", "heads": "32", "hidden": "14336"},
        "70b": {**_LLAMA, "depth": "80", "width": "8192", "heads": "64", "hidden": "28672"},
        "405b": {**_LLAMA, "depth": "126", "width": "16384", "heads": "128", "hidden": "53248"},
    },
    "gpt2": {
        "xl": {**_GPT, "depth": "48", "width": "1600", "heads": "25", "seq": "1024", "positions": "1024"},
        "175b": {**_GPT, "depth": "96", "width": "12288", "heads": "96", "seq": "2048", "positions": "2048"},
    },
    "moe": {
        "8x7b": {"dtype": "bf16", "batch": "1", "depth": "32", "width": "4096", "heads": "32", "kv_heads": "8",
                 "hidden": "14336", "vocabulary": "32000", "seq": "32768", "experts": "8", "top_k": "2"},
    },
}
"""Models that were really trained, as settings of the workloads, the one that is planned by default first: Llama 3
(Grattafiori et al., 2024, table 3, sequences of pre-training), GPT-2 XL (Radford et al., 2019), GPT-3 (Brown et al.,
2020, table 2.1) and Mixtral (Jiang et al., 2024, table 1)."""


def published(name: str, preset: str | None) -> tuple[str, list[str]]:
    """The name of a published model and its settings as assignments; none for a preset of the suite's own.

    Args:
        name: the workload.
        preset: a published model's, one of the suite's, or ``None`` for the usual.

    Raises:
        PlanError: there is no such preset.
    """
    models = PUBLISHED.get(name, {})
    if preset is not None and preset not in models and preset not in PRESETS:
        raise PlanError(f"{name} has no preset {preset!r}; choose one of {', '.join((*models, *PRESETS))}.")
    chosen = next(iter(models), "default") if preset is None else preset
    return chosen, [f"{key}={value}" for key, value in models.get(chosen, {}).items()]


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
        shape = TransformerShape(
            layers=int(settings["depth"]), hidden=int(settings["width"]), heads=int(settings["heads"]),
            kv_heads=int(settings["heads" if plain else "kv_heads"]),
            ffn=4 * int(settings["width"]) if plain else int(settings["hidden"]), vocab=int(settings["vocabulary"]),
            seq=int(settings["seq"]), gated=not plain, rms=not plain, bias=plain, rotary=not plain,
            dropout=float(settings.get("dropout", 0.0)), experts=int(settings.get("experts", 0)),
            top_k=int(settings.get("top_k", 0)), dtype=dtype)
    except (KeyError, TypeError, ValueError) as error:
        raise PlanError(f"The settings of {name} lack or spoil {reason_of(error)}; trace or capture it "
                        "again.") from None
    sizes = (shape.layers, shape.hidden, shape.heads, shape.kv_heads, shape.ffn, shape.vocab, shape.seq)
    if not all(0 < size <= MOST for size in sizes) or not (0 <= shape.experts <= MOST and 0 <= shape.top_k <= MOST
                                                           and 0.0 <= shape.dropout < 1.0):
        raise PlanError(f"The settings of {name} have sizes that no model has; trace or capture it again.")
    return shape


def check_decoder_plan(plan: ParallelPlan, shape: TransformerShape, on: Topology) -> None:
    """Raise ``PlanError``, in one sentence, unless the model divides as the plan wants it and the cluster holds it."""
    if plan.world_size > on.gpus:
        raise PlanError(f"The plan's {plan.world_size:,} ranks do not fit on {on.name}, which has {on.gpus:,} GPUs; "
                        "name a larger topology.")
    for kind in shape.kinds:
        for what, value, name, by in (
                *kind.shared_heads(plan.tp, plan.cp),
                ("features of an expert" if kind.experts else "features of the feed-forward part", kind.ffn, "tp",
                 plan.expert_tp if kind.experts else plan.tp),
                ("features of the shared experts", kind.shared_ffn, "tp", plan.tp),
                ("tokens of a sequence", kind.seq, "2 cp", 2 * plan.cp if plan.cp > 1 else 1),
                ("tokens of a rank", kind.seq // plan.cp, "tp", plan.tp if plan.sequence_parallel else 1),
                ("experts", kind.experts, "ep", plan.ep)):
            if value % by:
                raise PlanError(f"{value:,} {what} cannot be split evenly by {name}={by}; choose a divisor.")
    spread(plan, shape)
    if plan.ep > 1 and not any(kind.experts for kind in shape.kinds):
        raise PlanError(f"ep={plan.ep} needs experts, and the model has none; leave it out.")
    if plan.bucket_mb is not None:
        raise PlanError("bucket_mb changes when gradients are reduced, and an estimate reduces those of a "
                        "block together whatever their buckets; leave it out.")
