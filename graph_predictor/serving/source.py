"""``served_decoder``: the decoder that is served, from a name as people write it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from graph_predictor.parallel.planning import config_model, read_decoder
from graph_predictor.parallel.published_configs import CONFIGS
from graph_predictor.serving.setup import WHOLE
from tracer.shape_only.transformer import TransformerShape

SAME = {"deepseek-r1": "deepseek-v3", "llama-3.3-70b": "llama-3.1-70b", "kimi-k2.5": "kimi-k2",
        "minimax-m2.5": "minimax-m2"}
"""Models that are another one's sizes with other weights."""


@dataclass(frozen=True, slots=True)
class ServedDecoder:
    """A decoder and what is known of it.

    Attributes:
        name: of it.
        shape: its sizes.
        longest: tokens of a sequence at most; 0 where nothing says.
        notes: what was assumed.
    """

    name: str
    shape: TransformerShape
    longest: int
    notes: tuple[str, ...]

    def in_type(self, precision: str) -> ServedDecoder:
        """Return the decoder in a type of a whole model; narrower types are of its linear layers alone."""
        if precision not in WHOLE:
            return self
        runs = tuple(replace(run, dtype=precision) for run in self.shape.stack)
        return replace(self, shape=replace(self.shape, dtype=precision, stack=runs))


def published_name(source: str) -> str:
    """Return the published model that a name such as "meta-llama/Llama-3.1-70B-Instruct" is of, or the name itself."""
    if source in CONFIGS or source.count("/") > 1:
        return source
    plain = source.rpartition("/")[2].lower()
    found = max((name for name in (*CONFIGS, *SAME) if plain == name or plain.startswith(f"{name}-")), key=len,
                default=source)
    return SAME.get(found, found)


def served_decoder(source: str, settings: Sequence[str] = (), preset: str | None = None) -> ServedDecoder:
    """Return a decoder.

    Args:
        source: a published model's name, a ``config.json`` or its folder, or a workload.
        settings: as ``parallel.planning.plan`` takes them.
        preset: of a workload.

    Raises:
        PlanError: it is none that is known.
    """
    known = published_name(source)
    if preset is None and (model := config_model(known, settings)) is not None:
        # How long sequences of training are says nothing of those that are served.
        notes = tuple(note for note in model.notes if not note.startswith("Sequences are taken"))
        return ServedDecoder(model.name, model.shape, model.longest, notes)
    name, shape, _, notes = read_decoder(source, settings, preset)
    return ServedDecoder(name, shape, shape.learned_positions, notes)
