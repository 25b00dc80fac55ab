"""The written list: where a GPU runs other operations than the CPU, and how a shape-only trace comes to have them.

One file each. ``GPU`` is what a trace for a GPU installs; a trace for the CPU installs ``CPU``, which only mends where
fake tensors do otherwise than any device.
"""

from __future__ import annotations

from tracer.shape_only.substitutions import (
    attention,
    autocast,
    collectives,
    conversions,
    counting,
    dropout,
    grad_scaler,
    grouped,
    initialization,
    norms,
    one_hot,
    optimizers,
    placement,
    recurrent,
    rms_norm,
    sparse,
    subclasses,
)
from tracer.shape_only.substitutions.substitution import Site, Substitution, installed

GPU: tuple[Substitution, ...] = tuple(module.SUBSTITUTION for module in (
    placement, conversions, autocast, attention, rms_norm, norms, dropout, one_hot, recurrent, optimizers, grad_scaler,
    subclasses, collectives, sparse, initialization, counting, grouped))
CPU: tuple[Substitution, ...] = (conversions.SUBSTITUTION, one_hot.SUBSTITUTION, subclasses.SUBSTITUTION,
                                 collectives.SUBSTITUTION, sparse.SUBSTITUTION, initialization.SUBSTITUTION,
                                 optimizers.ON_CPU, grouped.SUBSTITUTION)

__all__ = ["CPU", "GPU", "Site", "Substitution", "installed"]
