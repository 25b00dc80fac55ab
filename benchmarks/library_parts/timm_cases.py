"""Every architecture of timm, as the loop of its benchmark script runs it (``zoo_parts.programs``)."""

from __future__ import annotations

from functools import partial

from zoo_parts.programs import Program, step_of

from library_parts.cases import LibraryCase, Step


def timm_cases() -> list[LibraryCase]:
    """Each architecture in training and inference, at its own image size."""
    import timm

    return [LibraryCase("timm", name, kind, partial(_step, name, kind)) for name in timm.list_models()
            for kind in ("train", "infer")]


def _step(name: str, kind: str, device: str) -> Step:
    import timm

    size = timm.get_pretrained_cfg(name).input_size[-1]
    return step_of(Program(kind, name, size), device)
