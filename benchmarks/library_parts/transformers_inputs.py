"""Inputs of a model of transformers by its own signature: what to try, likeliest first."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from library_parts.transformers_configs import parts_of, text_of

BATCH, LENGTH = 2, 32
GRID = (1, 8, 8)
"""Frames, rows and columns of patches of an image of any size."""
_IMAGE_IDS = ("image_token_id", "image_token_index", "im_patch_id", "media_token_id")
_VIDEO_IDS = ("video_token_id", "video_token_index")
_AUDIO_IDS = ("audio_token_id", "audio_token_index", "boa_token_id")


def first_of(config: Any, *names: str, otherwise: Any = None) -> Any:
    """The first of these attributes that a configuration, or one inside it, has."""
    for part in parts_of(config):
        for name in names:
            if getattr(part, name, None) is not None:
                return getattr(part, name)
    return otherwise


def candidates(model: Any, device: str, placeholders: dict[str, int]) -> Iterator[dict[str, Any]]:
    """What may be given to a model.

    Args:
        placeholders: how many tokens stand for "image", "video" and "audio" features in each sequence.
    """
    names = dict(inspect.signature(model.forward).parameters)
    wanted = {name for name, one in names.items() if one.default is inspect.Parameter.empty}
    main = model.main_input_name
    main_names = {main} if isinstance(main, str) else set(main)
    texts = _texts(model, names, device, placeholders)
    if "input_ids" not in names:
        texts.pop("attention_mask")
    for given in _media(model.config, names, wanted | main_names, device):
        found = {**texts, **given}
        yield {name: value for name, value in found.items() if name in names}


def _texts(model: Any, names: dict[str, Any], device: str, placeholders: dict[str, int]) -> dict[str, Any]:
    import torch

    config = model.config
    length = LENGTH + sum(placeholders.values())
    limit = min(max(int(first_of(text_of(config), "vocab_size", otherwise=100) or 100), 8), 200)
    ids = torch.arange(BATCH * length, device=device).reshape(BATCH, length) % max(limit - 8, 1) + 5
    kinds = torch.zeros(BATCH, length, dtype=torch.long, device=device)
    at = 2
    for number, (what, attributes) in enumerate((("image", _IMAGE_IDS), ("video", _VIDEO_IDS), ("audio", _AUDIO_IDS))):
        token, count = first_of(config, *attributes), placeholders.get(what, 0)
        if token is None or not count:
            continue
        start = first_of(config, f"{'audio' if what == 'audio' else 'vision'}_start_token_id")
        if start is not None:
            ids[:, at - 1] = start
        ids[:, at:at + count] = token
        kinds[:, at:at + count] = number + 1
        at += count + 1
    heads = type(model).__name__
    if heads.endswith("MultipleChoice"):
        ids, kinds = ids[:, None].expand(-1, 2, -1).contiguous(), kinds[:, None].expand(-1, 2, -1).contiguous()
    found: dict[str, Any] = {
        "input_ids": ids, "attention_mask": torch.ones_like(ids), "bbox": ids.new_zeros(*ids.shape, 4),
        "mm_token_type_ids": kinds, "qformer_input_ids": ids[:, :8],
        "qformer_attention_mask": torch.ones_like(ids[:, :8]), "decoder_input_ids": ids[:, :16] % 50 + 1}
    if not placeholders:
        found.pop("mm_token_type_ids")
    if "labels" in names and heads.endswith(("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration",
                                             "ForSpeechSeq2Seq")) and "input_ids" in names:
        found["labels"] = found["decoder_input_ids"] if "decoder_input_ids" in names else ids
    elif "labels" in names and heads.endswith(("ForSequenceClassification", "ForImageClassification",
                                               "ForMultipleChoice")):
        found["labels"] = ids.new_zeros(BATCH)
    elif "labels" in names and heads.endswith("ForTokenClassification"):
        found["labels"] = torch.zeros_like(ids)
    if "labels" in found and not heads.endswith(("ForCausalLM", "LMHeadModel", "ForMaskedLM")) and (
            "decoder_input_ids" in names and "input_ids" not in names):
        found.pop("labels")
    return found


def _media(config: Any, names: dict[str, Any], wanted: set[str], device: str) -> Iterator[dict[str, Any]]:
    """Images, videos, sounds and series, in each of the forms that models want."""
    if "past_values" in wanted:
        yield from _series(config, device)
    elif "grid_thw" in names:
        yield from _patches(config, device, "hidden_states", "grid_thw")
        yield from _patches(config, device, "pixel_values", "grid_thw")
    elif "image_grid_thw" in names:
        yield from _patches(config, device, "pixel_values", "image_grid_thw")
    elif "pixel_values" in names and {"input_features", "input_values"}.isdisjoint(wanted):
        yield from _images(config, names, device)
    elif "pixel_values_videos" in wanted:
        yield from _images(config, names, device, "pixel_values_videos")
    elif not {"input_features", "input_values", "spectrogram", "audio_mel"}.isdisjoint(names):
        yield from _sounds(config, names, device)
    else:
        yield from _others(config, names, device)


def _size(config: Any) -> tuple[int, int]:
    size = first_of(config, "image_size", "img_size", "input_size", otherwise=224)
    if isinstance(size, dict):
        size = (size.get("height", 224), size.get("width", 224))
    if isinstance(size, (list, tuple)):
        return (int(size[0]), int(size[-1]))
    return int(size), int(size)


def _images(config: Any, names: dict[str, Any], device: str, name: str = "pixel_values") -> Iterator[dict[str, Any]]:
    import torch

    height, width = _size(config)
    channels = first_of(config, "num_channels", "in_channels", "in_chans", otherwise=3)
    channels = channels if isinstance(channels, int) else 3
    frames = first_of(config, "num_frames", "frames_per_clip")
    rest: dict[str, Any] = {
        "pixel_mask": torch.ones(BATCH, height, width, dtype=torch.long, device=device)}
    masked = names.get("bool_masked_pos")
    shapes: list[tuple[int, ...]] = [(channels, height, width), (1, channels, height, width)]
    if name == "pixel_values_videos" or frames is not None:
        shapes.insert(0, (int(frames or 16), channels, height, width))
    if "prompt_pixel_values" in names:
        rest |= {"prompt_pixel_values": torch.rand(BATCH, channels, height, width, device=device),
                 "prompt_masks": torch.rand(BATCH, channels, height, width, device=device)}
    if "task_inputs" in names:
        rest["task_inputs"] = torch.ones(BATCH, 77, dtype=torch.long, device=device)
    patch = first_of(config, "patch_size", otherwise=16)
    if "spatial_shapes" in names or "pixel_position_ids" in names:
        patch = patch if isinstance(patch, int) else patch[0]
        shapes.insert(0, (64, channels * patch * patch))
        rest["spatial_shapes"] = torch.tensor([[8, 8]] * BATCH, device=device)
        rest["pixel_position_ids"] = torch.zeros(BATCH, 64, 2, dtype=torch.long, device=device)
    elif isinstance(patch, int):
        shapes.append((64, channels * patch * patch))
    for shape in shapes:
        found = {name: torch.rand(BATCH, *shape, device=device), **rest}
        if masked is not None and masked.default is masked.empty:
            count = (height // patch) * (width // patch) * (shape[0] // first_of(config, "tubelet_size", otherwise=1)
                                                            if len(shape) == 4 else 1)
            found["bool_masked_pos"] = (torch.arange(count, device=device) % 2 == 0).expand(BATCH, -1)
        if "pixel_attention_mask" in names and len(shape) != 3:
            found["pixel_attention_mask"] = torch.ones(BATCH, *((1, height, width) if len(shape) == 4 else (64,)),
                                                       dtype=torch.long, device=device)
        yield found
        if "image_sizes" in names:
            yield {**found, "image_sizes": torch.tensor([[height, width]] * BATCH)}


def _patches(config: Any, device: str, name: str, grid: str) -> Iterator[dict[str, Any]]:
    """Images of any size, cut into patches that lie one after the other."""
    import torch

    vision = getattr(config, "vision_config", config)
    patch = first_of(vision, "patch_size", "spatial_patch_size", otherwise=14)
    channels = first_of(vision, "in_channels", "in_chans", "num_channels", otherwise=3)
    frames = first_of(vision, "temporal_patch_size", "patch_temporal", otherwise=1)
    count = BATCH * GRID[0] * GRID[1] * GRID[2]
    grids = torch.tensor([GRID] * BATCH, device=device)
    flat = (count, channels * frames * patch * patch)
    for shape in (flat, (count, channels, patch, patch), (1, count, channels, patch, patch),
                  (count, channels * patch * patch)):
        yield {name: torch.rand(*shape, device=device), grid: grids}


def _sounds(config: Any, names: dict[str, Any], device: str) -> Iterator[dict[str, Any]]:
    """Sound as samples or as spectra, without masks and with them."""
    import torch

    mels = first_of(config, "num_mel_bins", "feature_projection_input_dim", "input_feat_per_channel", "n_mels",
                    "input_dim", "num_mels", "input_feat_size", "feature_size", "input_channels", "model_in_dim",
                    otherwise=80)
    mels = mels if isinstance(mels, int) else 80
    positions = first_of(config, "max_source_positions", otherwise=1500)
    name = next(one for one in ("input_features", "input_values", "spectrogram", "audio_mel") if one in names)
    spectra: list[tuple[int, ...]] = [(256, mels), (mels, 2 * positions), (mels, 3000), (256, 80), (128, 3000),
                                      (256, 160)]
    if first_of(config, "max_source_positions") is not None and "speech_to_text" not in str(config.model_type):
        spectra = [*spectra[1:], spectra[0]]
    forms = spectra if name != "input_values" else [
        (16000,), (1, 16000), (first_of(config, "max_length", otherwise=1024), mels), (1, 1024, 64), (1024, 128),
        *spectra]
    for shape in forms:
        sound = {name: torch.rand(BATCH, *shape, device=device)}
        length = shape[-1] if shape[0] == mels or len(shape) == 1 else shape[-2]
        mask = torch.ones(BATCH, length, dtype=torch.long, device=device)
        masks = {"input_features_mask": mask, "audio_mel_mask": mask < 0, "feature_attention_mask": mask,
                 "padding_mask": mask}
        if "input_ids" not in names:
            masks["attention_mask"] = mask
        if not masks.keys().isdisjoint(names):
            yield {**sound, **masks}
        yield sound


def _series(config: Any, device: str) -> Iterator[dict[str, Any]]:
    """Time series with what is known of their times."""
    import torch

    context = first_of(config, "context_length", otherwise=64)
    lags = max(first_of(config, "lags_sequence", otherwise=[0]) or [0])
    inputs = first_of(config, "num_input_channels", "input_size", otherwise=1)
    ahead = first_of(config, "prediction_length", otherwise=8)
    times = first_of(config, "num_time_features", otherwise=0)
    past = context + lags
    for shape in ((past, inputs), (past,), (context, inputs), (context,)):
        values = torch.rand(BATCH, *shape, device=device)
        future = torch.rand(BATCH, ahead, *shape[1:], device=device)
        yield {"past_values": values, "past_observed_mask": torch.ones_like(values), "future_values": future,
               "past_time_features": torch.rand(BATCH, past, times, device=device),
               "future_time_features": torch.rand(BATCH, ahead, times, device=device),
               "past_values_padding": torch.zeros(BATCH, past, dtype=torch.long, device=device),
               "freq": torch.zeros(BATCH, 1, dtype=torch.long, device=device)}


def _others(config: Any, names: dict[str, Any], device: str) -> Iterator[dict[str, Any]]:
    """What only one or two models want, and nothing for a model of text."""
    import torch

    width = first_of(config, "hidden_size", "d_model", "hidden_dim", otherwise=768)
    found: dict[str, Any] = {}
    if "flattened_patches" in names:
        found["flattened_patches"] = torch.rand(BATCH, 64, 2 + 3 * 16 * 16, device=device)
    if "input_ids" not in names and "inputs_embeds" in names:
        found["inputs_embeds"] = torch.rand(BATCH, LENGTH, width, device=device)
    if "inputs" in names:
        found["inputs"] = torch.zeros(BATCH, 2048, dtype=torch.long, device=device)
    if "query_embeds" in names:
        found["query_embeds"] = torch.rand(BATCH, 8, width, device=device)
    if "hidden_states" in names and "input_ids" not in names:
        found["hidden_states"] = torch.rand(BATCH, LENGTH, width, device=device)
    if "latents" in names:
        found["latents"] = torch.rand(BATCH, LENGTH, width, device=device)
    if "states" in names:
        states, actions = first_of(config, "state_dim", otherwise=17), first_of(config, "act_dim", otherwise=4)
        found |= {"states": torch.rand(BATCH, 20, states, device=device), "timesteps": torch.zeros(
            BATCH, 20, dtype=torch.long, device=device), "actions": torch.rand(BATCH, 20, actions, device=device),
            "rewards": torch.rand(BATCH, 20, 1, device=device),
            "returns_to_go": torch.rand(BATCH, 20, 1, device=device)}
    if "codebook_idx" in names:
        found |= {"codebook_idx": 1, "input_ids": torch.zeros(BATCH, LENGTH, 8, dtype=torch.long, device=device)}
    yield found
