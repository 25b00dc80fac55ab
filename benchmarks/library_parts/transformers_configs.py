"""Small configurations: the widths of the published model, and a layer of each kind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers",
           "num_encoder_layers", "num_decoder_layers", "depth", "layers", "num_local_layers", "num_decode_layers")
LEAST = 2
_DEPTHS = ("depths", "encoder_depths", "stage_depths", "layers")


def config_of(kind: Any, small: bool) -> Any:
    """A configuration of few layers, or of all.

    Raises:
        Exception: whatever the library does where its own defaults make no configuration.
    """
    config = kind()
    if small:
        shrink(config)
    for name, value in (("pad_token_id", 0), ("num_labels", 2)):
        if getattr(config, name, None) is None and hasattr(config, name):
            setattr(config, name, value)
    text = text_of(config)
    for part in parts_of(config):
        heads = _of_all_layers(part, "num_attention_heads")
        if vars(part).get("num_key_value_heads", 0) is None and isinstance(heads, int):
            part.num_key_value_heads = heads
        if vars(part).get("head_dim", 0) is None and isinstance(heads, int):
            part.head_dim = part.hidden_size // heads
    if vars(config).get("default_language", 0) is None and getattr(config, "languages", None):
        config.default_language = config.languages[0]
    for part in parts_of(config):  # what a tower gives is as wide as what takes it, which some defaults forget
        width = "output_dim" if "n_window" in vars(part) else "out_hidden_size"
        if part is not config and text is not config and width in vars(part) and hasattr(text, "hidden_size"):
            setattr(part, width, text.hidden_size)
    if getattr(text, "pad_token_id", 0) is None:
        text.pad_token_id = 0
    return config


def _of_all_layers(part: Any, name: str) -> Any:
    """What a configuration says of all its layers; ``None`` where it says nothing, or raises as layers differ."""
    try:
        return getattr(part, name, None)
    except RuntimeError:
        return None


def text_of(config: Any) -> Any:
    """The part of a configuration that is about text; all of it where there are several."""
    try:
        return config.get_text_config()
    except ValueError:
        return config


def parts_of(config: Any) -> Iterator[Any]:
    """A configuration and those inside it."""
    yield config
    for value in list(vars(config).values()):
        if hasattr(value, "model_type") and hasattr(value, "to_dict"):
            yield from parts_of(value)


def shrink(config: Any) -> None:
    """Leave a configuration, and those inside it, a layer of each kind and two at least."""
    for part in parts_of(config):
        for name in _DEPTHS:
            depths = vars(part).get(name)
            if isinstance(depths, (list, tuple)) and depths and all(isinstance(one, int) for one in depths):
                setattr(part, name, type(depths)(min(one, LEAST) for one in depths))
        if any(isinstance(vars(part).get(name), (list, tuple)) for name in ("depths", "stage_names")):
            continue  # its number of layers is that of its stages
        for name in _LAYERS:
            _shorten(part, name)


def _shorten(part: Any, name: str) -> None:
    count = getattr(part, name, None)
    if not isinstance(count, int) or isinstance(count, bool) or count <= LEAST:
        return
    kept = list(range(LEAST))
    for key in ("layer_types", "layers_block_type"):
        kinds = getattr(part, key, None)
        if isinstance(kinds, (list, tuple)) and len(kinds) == count:
            first = sorted({kind: i for i, kind in reversed(list(enumerate(kinds)))}.values())
            # A list that follows from other numbers keeps its beginning.
            kept = sorted({*first, *range(LEAST)}) if key in vars(part) else list(range(max(LEAST, first[-1] + 1)))
    try:
        setattr(part, name, len(kept))
    except (AttributeError, TypeError, ValueError, NotImplementedError):
        return
    for key, value in list(vars(part).items()):
        if isinstance(value, (list, tuple)) and len(value) == count:
            setattr(part, key, type(value)(value[i] for i in kept))
