"""The arithmetic of a step: global TF32 switches set for its duration and put back, and autocast."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from tracer.workloads.settings import DtypeMode


def parameter_dtype(mode: DtypeMode) -> torch.dtype:
    """The type of parameters and floating-point inputs."""
    return torch.bfloat16 if mode is DtypeMode.BF16 else torch.float32


def autocast(mode: DtypeMode, device_type: str) -> AbstractContextManager[Any]:
    """Autocast for forward and loss in ``bf16-autocast``, nothing otherwise."""
    if mode is not DtypeMode.BF16_AUTOCAST:
        return nullcontext()
    context: AbstractContextManager[Any] = torch.autocast(device_type, dtype=torch.bfloat16)
    return context


@contextmanager
def tf32(enabled: bool) -> Iterator[None]:
    """TF32 on or off for matrix products, convolutions and RNNs; every switch is put back at the end.

    The switches are set through ``allow_tf32``, which all supported versions have and which sets the newer
    ``fp32_precision`` too (torch 2.9 on). Mixing both interfaces makes reading the older one an error, so reading
    it is guarded and both are restored, older first.
    """
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    parts: list[Any] = [matmul, getattr(cudnn, "conv", None), getattr(cudnn, "rnn", None)]
    newer = [(part, part.fp32_precision) for part in parts if hasattr(part, "fp32_precision")]
    try:
        precision, convolutions = torch.get_float32_matmul_precision(), cudnn.allow_tf32
    except RuntimeError:  # the caller set them through the newer interface, which alone is then to be restored
        precision, convolutions = "highest", True
    matmul.allow_tf32 = cudnn.allow_tf32 = enabled
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        cudnn.allow_tf32 = convolutions
        for part, value in newer:
            part.fp32_precision = value
