"""The decoder that a plan is of, its ``TransformerShape``: a workload's, a published model's, a config's or a trace's;
and whether a plan fits it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from graph_predictor.sizes.retrace import MOST
from kernel_models.collectives import Topology
from kernel_models.device import DeviceSpec
from kernel_models.device_choice import find_device
from planner.parallel.config_file import ConfigModel, config_path, decoder_of_config, read_config
from planner.parallel.published_configs import CONFIGS
from planner.parallel.stages import spread
from tracer.errors import ForetraceError, reason_of
from tracer.job import Job, read_job
from tracer.parallel_plan import ParallelPlan, PlanError
from tracer.shape_only.transformer import TransformerShape
from tracer.workloads.settings import PRESETS

_MOST_DIGITS = 10
"""Most digits of a number of samples, and one."""
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


def read_decoder(source: str | Job, assignments: Sequence[str] = (),
                 preset: str | None = None) -> tuple[str, TransformerShape, int, tuple[str, ...]]:
    """Return what is planned, the decoder of a workload's or a model's name, a config or a trace, the sequences of its
    step, and what was assumed."""
    from tracer import workloads

    if isinstance(source, str) and (model := config_model(source, assignments)) is not None:
        if preset is not None:
            raise PlanError(f"{source} says itself which sizes its model has; leave --preset {preset} out.")
        changed = f" with {', '.join(assignments)}" if assignments else ""
        return f"{model.name}{changed}", model.shape, model.batch, model.notes
    if isinstance(source, str) and source in workloads.names():
        chosen, own = published(source, preset)
        settings = workloads.parse(source, [*own, *assignments], preset="real" if own else chosen)
        changed = f" with {', '.join(assignments)}" if assignments else ""
        return (f"{source} {chosen}{changed}", decoder_of(source, workloads.as_plain(settings)),
                settings.samples_per_step, ())
    job = _read(source) if isinstance(source, str) else source
    meta, said = job.graphs[0].meta, source if isinstance(source, str) else "The job"
    if not meta.workload:
        raise PlanError(f"{said} does not say which model it is of, so that how to split its layers is not known; "
                        "give a workload, or a capture or trace made with --workload.")
    if preset is not None:
        raise PlanError(f"{said} says itself which sizes its model has; leave --preset {preset} out.")
    values = {**meta.workload["settings"], **dict(item.partition("=")[::2] for item in assignments)}
    return (f"{meta.workload['name']} of {said}", decoder_of(meta.workload["name"], values),
            _whole(values, "batch") * _whole(values, "accumulation"), ())


def _check_there(source: str) -> None:
    """Raise ``PlanError`` for a word that is neither a path nor a name of a model."""
    if Path(source).name != source or Path(source).suffix or Path(source).exists():
        return
    names = [*DECODERS, *CONFIGS]
    near = get_close_matches(source.lower(), names, n=3)
    said = f"did you mean {' or '.join(near)}?" if near else f"known models are {', '.join(names)}."
    raise PlanError(f"{source} is neither a path nor a model that is known; {said}")


def _read(source: str) -> Job:
    """Return a capture or trace; for what is none, say too that it is no model's config."""
    _check_there(source)
    try:
        return read_job([source])
    except ForetraceError as error:
        raise PlanError(f"{error} Nor is {source} a model's config.json, which has a model_type, or a folder with "
                        "one.") from None


def config_model(source: str, assignments: Sequence[str]) -> ConfigModel | None:
    """Return the model of a config's path or of a published model's name; ``None`` for another source."""
    if source in CONFIGS:
        return decoder_of_config(CONFIGS[source], source, source, assignments)
    path = config_path(source)
    return None if path is None else read_config(path, assignments)


def _whole(values: Mapping[str, Any], name: str) -> int:
    """Return a setting that is a number of samples, 1 if it is not there. Raises ``PlanError``."""
    text = str(values.get(name, 1))
    if not (text.isascii() and text.isdecimal() and 0 < len(text) < _MOST_DIGITS and int(text)):
        raise PlanError(f"The setting {name}={text[:_MOST_DIGITS]} is no number of samples; give --set {name}=8.")
    return int(text)


def other_nodes(on: Topology, spec: DeviceSpec) -> list[str]:
    """Say where a topology's nodes have another device than the one that computes."""
    node = find_device(on.node.device).name
    return [] if node == spec.name else [
        f"The nodes of the topology have {node}, not {spec.name}; their network is taken."]
