"""The written list: where a GPU runs other operations than the CPU, and how a shape-only trace comes to have them.

Each entry is a function that puts itself in place on a ``Site`` for the length of a trace. ``GPU`` is what a trace for
a GPU installs; a trace for the CPU installs ``CPU``, which only mends where fake tensors do otherwise than any device.
"""

from __future__ import annotations

from tracer.shape_only.substitutions.autocast import autocast, grad_scaler
from tracer.shape_only.substitutions.layers import attention, norms, recurrent, rms_norm
from tracer.shape_only.substitutions.operators import (
    clipping,
    collectives,
    conversions,
    counting,
    ctc,
    dropout,
    grouped,
    initialization,
    one_hot,
    optimizers,
    sparse,
)
from tracer.shape_only.substitutions.placement import placement
from tracer.shape_only.uncompiled import compilers

GPU = (placement, conversions, autocast, attention, rms_norm, norms, dropout, one_hot, recurrent, optimizers,
       grad_scaler, collectives, sparse, initialization, counting, ctc, grouped, compilers)
CPU = (conversions, one_hot, collectives, sparse, initialization, clipping, ctc, grouped, compilers)

__all__ = ["CPU", "GPU"]
