"""Captures from inside training frameworks: each a few lines over ``tracer.capture``.

- Hugging Face Trainer: ``Trainer(…, callbacks=[TrainerCapture("runs/a")])``
- Lightning: ``Trainer(…, callbacks=[LightningCapture("runs/a")])``
- Accelerate: ``with AccelerateCapture(accelerator, "runs/a") as capture: … capture.step()``
- torchtitan: ``profiler=TitanCapture.Config(out="runs/a")`` in the trainer's configuration
- DeepSpeed: ``engine = capture_deepspeed(engine, "runs/a")``
- Megatron-LM: ``with megatron_capture("runs/a"): pretrain(…)``
- Ray Train: ``with ray_capture("runs/a") as capture: … capture.step()`` in the loop of a worker
- torch.profiler: ``profile(…, on_trace_ready=handler("runs/a"))``

All but the last record what ``tracer.capture`` records: steps timed without the profiler, then profiled ones, and the
execution trace. They take its options (``steps``, ``warmup``, ``timed``, …). Importing this package imports no
framework.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracer.lazy import lazily

if TYPE_CHECKING:
    from tracer.hooks.lightning_callback import LightningCapture
    from tracer.hooks.loops import AccelerateCapture, capture_deepspeed, handler, megatron_capture, ray_capture
    from tracer.hooks.titan_profiler import TitanCapture
    from tracer.hooks.trainer_callback import TrainerCapture

HOMES = {
    "AccelerateCapture": "tracer.hooks.loops",
    "LightningCapture": "tracer.hooks.lightning_callback",
    "TitanCapture": "tracer.hooks.titan_profiler",
    "TrainerCapture": "tracer.hooks.trainer_callback",
    "capture_deepspeed": "tracer.hooks.loops",
    "handler": "tracer.hooks.loops",
    "megatron_capture": "tracer.hooks.loops",
    "ray_capture": "tracer.hooks.loops",
}

__all__ = ["HOMES", "AccelerateCapture", "LightningCapture", "TitanCapture", "TrainerCapture", "capture_deepspeed",
           "handler", "megatron_capture", "ray_capture"]

__getattr__, __dir__ = lazily(__name__, HOMES)
