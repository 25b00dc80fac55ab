"""Hooks for training frameworks, from ``tracer.hooks``, which explains them: ``foretrace.hooks.TrainerCapture``, …"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracer.hooks import HOMES
from tracer.lazy import lazily

if TYPE_CHECKING:
    from tracer.hooks import AccelerateCapture as AccelerateCapture
    from tracer.hooks import LightningCapture as LightningCapture
    from tracer.hooks import TitanCapture as TitanCapture
    from tracer.hooks import TrainerCapture as TrainerCapture
    from tracer.hooks import capture_deepspeed as capture_deepspeed
    from tracer.hooks import handler as handler
    from tracer.hooks import megatron_capture as megatron_capture
    from tracer.hooks import ray_capture as ray_capture

__getattr__, __dir__ = lazily(__name__, HOMES)
