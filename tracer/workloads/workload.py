"""``Workload``: a model, its optimizer and its data, and the one training step they make.

A step is: drop the gradients; for each micro-batch copy it to the device, run forward and loss under the dtype mode,
and backward; then update the parameters. Nothing in it waits for the device: the loss comes back as a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from tracer.workloads.data import Batch, StepBatch, serve
from tracer.workloads.optimizers import make_optimizer, parameter_count
from tracer.workloads.precision import autocast, default_dtype, parameter_dtype, tf32
from tracer.workloads.settings import DtypeMode, Settings, WorkloadError

MODULES = {"resnet50": "resnet"}
"""Files of ``tracer.workloads.models`` whose name is not the workload's."""


@dataclass(frozen=True)
class Definition:
    """A workload's definition, which a file of ``tracer.workloads.models`` has under the name ``DEFINITION``.

    Attributes:
        model: the module for given settings. Its ``blocks`` lists the repeated parts that are checkpointed, and
            that a sharding wrapper may treat one by one.
        batch: one micro-batch on the host, drawn from a generator.
        loss: output and targets → the loss, a scalar in fp32.
    """

    model: Callable[[Any], nn.Module]
    batch: Callable[[Any, torch.Generator], Batch]
    loss: Callable[[Any, Tensor], Tensor]


class Workload:
    """One training job of the suite; ``create`` and ``tracer.workloads.build`` make it.

    Attributes:
        settings: what it was built from.
        model: the module, never the compiled one; a wrapper's module after ``wrap``.
        optimizer: over ``model``'s parameters.
        loss_fn: ``loss_fn(model(*batch.inputs), batch.targets)`` is the loss, a scalar.
        blocks: the model's repeated parts, in the order they run (for FSDP2, pipelines, per-block compilation).
        parameters: trainable numbers, shared ones counted once.
    """

    def __init__(self, settings: Settings, definition: Definition, model: nn.Module) -> None:
        self.settings = settings
        self.loss_fn = definition.loss
        self.blocks: list[nn.Module] = list(model.blocks)
        self.parameters = parameter_count(model.parameters())
        self.device = torch.device(settings.device)
        self._make_batch = definition.batch
        self._started = False
        self._use(model)

    def _use(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = make_optimizer(self.settings.optimizer, model)
        self._forward: Callable[..., Any] = torch.compile(model, dynamic=False) if self.settings.compile else model

    def wrap(self, function: Callable[[nn.Module], nn.Module]) -> Workload:
        """Replace the model by ``function(model)``, which may also change it in place; returns the workload.

        The optimizer is made anew over the result's parameters, and compilation is of the result. Both
        ``workload.wrap(DistributedDataParallel)`` and a function that calls FSDP2's ``fully_shard`` on
        ``workload.blocks`` and the model will do. Gradients of all micro-batches but the last stay unsynchronised.
        """
        self._use(function(self.model))
        return self

    @property
    def samples_per_step(self) -> int:
        """Samples of one ``step``, all micro-batches together."""
        return self.settings.samples_per_step

    @property
    def tokens_per_step(self) -> int | None:
        """Tokens of one ``step``; None for workloads without text."""
        return self.settings.tokens_per_step

    def batches(self) -> Iterator[StepBatch]:
        """Endless steps' batches on the host (pinned for a GPU), the same ones for the same settings."""
        return serve(lambda generator: self._make_batch(self.settings, generator), seed=self.settings.seed,
                     accumulation=self.settings.accumulation, pin=self.device.type == "cuda")

    def step(self, batch: StepBatch) -> Tensor:
        """One full training step; returns the detached loss, a scalar on the device, mean over the micro-batches.

        The first step seeds torch's global generators, which dropout draws from; later ones leave them alone.
        """
        if not self._started:
            torch.manual_seed(self.settings.seed)
            self._started = True
        losses = []
        with tf32(self.settings.dtype is DtypeMode.TF32):
            self.optimizer.zero_grad(set_to_none=True)
            for number, micro_batch in enumerate(batch, start=1):
                with _gradient_sync(self.model, last=number == len(batch)):
                    loss = self.loss(micro_batch)
                    (loss / len(batch) if len(batch) > 1 else loss).backward()
                losses.append(loss.detach())
            self.optimizer.step()
        return torch.stack(losses).mean() if len(losses) > 1 else losses[0]

    def loss(self, batch: Batch) -> Tensor:
        """Forward and loss of one micro-batch under the dtype mode's autocast, with gradients to follow."""
        on_device = self._on_device(batch)
        with autocast(self.settings.dtype, self.device.type):
            return self.loss_fn(self._forward(*on_device.inputs), on_device.targets)

    def _on_device(self, batch: Batch) -> Batch:
        return batch.to(self.device, parameter_dtype(self.settings.dtype))


def create(settings: Settings) -> Workload:
    """Build the model on its device from the seed, and the optimizer. The global generators are left as they were.

    Raises:
        WorkloadError: The device does not exist here.
    """
    name = MODULES.get(settings.WORKLOAD, settings.WORKLOAD)
    definition: Definition = import_module(f"tracer.workloads.models.{name}").DEFINITION
    device = _device(settings.device)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(settings.seed)
        with device, default_dtype(parameter_dtype(settings.dtype)):
            model = definition.model(settings)
    if getattr(settings, "channels_last", False):
        for parameter in model.parameters():
            if parameter.dim() == 4:
                parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
    return Workload(settings, definition, model)


def _device(text: str) -> torch.device:
    try:
        device = torch.device(text)
    except RuntimeError as error:
        raise WorkloadError(f"device={text} is no torch device; choose cpu, cuda or meta.") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise WorkloadError(f"device={text} is not here: torch {torch.__version__} sees {torch.cuda.device_count()} "
                            "GPUs; choose device=cpu, or check the driver and that torch is a CUDA build.")
    return device


def _gradient_sync(model: nn.Module, *, last: bool) -> AbstractContextManager[Any]:
    """Let only the last micro-batch communicate gradients, where the model's wrapper has a switch for it."""
    if hasattr(model, "set_requires_gradient_sync"):  # FSDP2
        model.set_requires_gradient_sync(last)
    elif hasattr(model, "no_sync") and not last:  # DDP, FSDP1
        context: AbstractContextManager[Any] = model.no_sync()
        return context
    return nullcontext()
