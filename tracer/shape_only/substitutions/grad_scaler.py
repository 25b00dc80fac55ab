"""The gradient scaler of fp16 training: on, as on a GPU, with gradients that are taken to be finite.

torch switches ``GradScaler("cuda")`` off where there is no GPU. Whether it skips a step is read from the gradients, and
a trace has no values: the step is taken, without the wait of that read.
"""

from __future__ import annotations

from typing import Any

import torch

from tracer.shape_only.substitutions.substitution import Site, Substitution


def _install(site: Site) -> None:
    kind = getattr(torch.amp, "GradScaler", None)
    if kind is None:
        return
    begin = kind.__init__

    def __init__(self: Any, device: str = "cuda", *args: Any, **kwargs: Any) -> None:
        begin(self, "cpu" if device == "cuda" else device, *args, **kwargs)

    def _maybe_opt_step(self: Any, optimizer: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
        site.used("grad_scaler")
        site.note("The gradient scaler's question whether gradients are finite was answered with yes: on a GPU the "
                  "host waits for that answer.")
        return optimizer.step(*args, **kwargs)

    site.patch(kind, "__init__", __init__)
    site.patch(kind, "_maybe_opt_step", _maybe_opt_step)


SUBSTITUTION = Substitution(
    "grad_scaler", "GradScaler is on with a GPU only; it reads whether gradients are finite.",
    cpu=frozenset(), gpu=frozenset({"aten::_amp_foreach_non_finite_check_and_unscale_", "aten::_amp_update_scale_"}),
    install=_install)
