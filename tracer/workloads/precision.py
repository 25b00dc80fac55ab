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
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """New floating-point tensors are of this type. (Casting a finished model fails at times under fake tensors.)"""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def tf32(enabled: bool) -> Iterator[None]:
    """TF32 on or off for matrix products, convolutions and RNNs; every switch is put back at the end.

    The switches are set through the older interface, which all supported versions have and which keeps the newer
    ``fp32_precision`` (torch 2.9 on) in step. Reading the older one is an error where a caller has used the newer,
    so reading is guarded and both are restored, older first. Where the switches stand right already nothing is
    touched: a caller for whom 10 µs a step matter holds ``tf32`` around the whole loop.
    """
    cudnn = torch.backends.cudnn
    wanted = "high" if enabled else "highest"
    try:
        precision, convolutions = torch.get_float32_matmul_precision(), cudnn.allow_tf32
    except RuntimeError:  # set through the newer interface, which alone is then to be restored
        precision, convolutions = "highest", True
    else:
        if (precision, convolutions) == (wanted, enabled):
            yield
            return
    parts = [(backend, name) for backend, name in _PARTS if hasattr(getattr(backend, name, None), "fp32_precision")]
    newer = [(getattr(backend, name), getattr(backend, name).fp32_precision) for backend, name in parts]
    torch.set_float32_matmul_precision(wanted)  # not `allow_tf32`, which leaves the CPU's switch behind
    cudnn.allow_tf32 = enabled
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        cudnn.allow_tf32 = convolutions
        for part, value in newer:
            part.fp32_precision = value


_PARTS: list[tuple[Any, str]] = [
    (torch.backends.cuda, "matmul"), (torch.backends.cudnn, "conv"), (torch.backends.cudnn, "rnn"),
    (torch.backends.mkldnn, "matmul"),
]
"""The newer interface's places of the precisions that the older one sets."""
