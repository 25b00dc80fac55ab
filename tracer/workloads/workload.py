"""``Workload``: a model, its optimizer and its data, and the training step that they make.

A step drops the gradients. For each micro-batch it copies the data to the device, runs forward and loss under the dtype
mode, and backward. Then it updates the parameters. It never waits for the device: the loss is returned as a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from tracer.workloads.models import language, recommendation, vision
from tracer.workloads.models.parts import Batch, Definition, StepBatch, serve
from tracer.workloads.settings import DtypeMode, OptimizerKind, Settings, WorkloadError

DEFINITIONS = {**language.DEFINITIONS, **recommendation.DEFINITIONS, **vision.DEFINITIONS}
"""The workloads' definitions by name."""
LEARNING_RATE = {"sgd": 0.01, "adamw": 1e-3}  # chosen: a usual value for SGD, AdamW's default in PyTorch
MOMENTUM = 0.9  # chosen: usual
WEIGHT_DECAY = 0.01  # PyTorch's default for AdamW

_MAKERS: dict[OptimizerKind, Callable[[Any], torch.optim.Optimizer]] = {
    OptimizerKind.SGD: lambda groups: torch.optim.SGD(
        groups, lr=LEARNING_RATE["sgd"], momentum=MOMENTUM, foreach=True),
    OptimizerKind.ADAMW: lambda groups: torch.optim.AdamW(
        groups, lr=LEARNING_RATE["adamw"], weight_decay=WEIGHT_DECAY, foreach=False),
    OptimizerKind.ADAMW_FOREACH: lambda groups: torch.optim.AdamW(
        groups, lr=LEARNING_RATE["adamw"], weight_decay=WEIGHT_DECAY, foreach=True),
    OptimizerKind.ADAMW_FUSED: lambda groups: torch.optim.AdamW(
        groups, lr=LEARNING_RATE["adamw"], weight_decay=WEIGHT_DECAY, fused=True),
}
_PARTS: list[tuple[Any, str]] = [
    (torch.backends.cuda, "matmul"), (torch.backends.cudnn, "conv"), (torch.backends.cudnn, "rnn"),
    (torch.backends.mkldnn, "matmul"),
]
"""The modules of the newer interface for the precisions that the older interface sets."""


class Workload:
    """One training job of the suite; ``create`` and ``tracer.workloads.build`` make it.

    Attributes:
        settings: the settings from which it was built.
        model: the uncompiled module; after ``wrap`` the wrapper's module.
        optimizer: over ``model``'s parameters.
        loss_fn: ``loss_fn(model(*batch.inputs), batch.targets)`` is the loss, a scalar.
        blocks: the model's repeated parts, in execution order (for FSDP2, pipelines, per-block compilation).
        parameters: number of trainable parameters; shared ones count once.
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
        """Replace the model by ``function(model)``, which may also change it in place; return the workload.

        The optimizer is made again for the result's parameters, and compilation applies to the result. Both
        ``workload.wrap(DistributedDataParallel)`` and a function that calls FSDP2's ``fully_shard`` on
        ``workload.blocks`` and the model work. Only the last micro-batch synchronises gradients.
        """
        self._use(function(self.model))
        return self

    @property
    def samples_per_step(self) -> int:
        """Return the number of samples of one ``step`` of this process, all its micro-batches together."""
        return self.settings.samples_per_step

    @property
    def tokens_per_step(self) -> int | None:
        """Return the number of tokens of one ``step``; None for workloads without text."""
        return self.settings.tokens_per_step

    def batches(self) -> Iterator[StepBatch]:
        """Yield batches of steps without end, on the host (pinned for a GPU); equal settings give equal batches."""
        return serve(lambda generator: self._make_batch(self.settings, generator), seed=self.settings.seed,
                     accumulation=self.settings.accumulation, pin=self.device.type == "cuda")

    def step(self, batch: StepBatch) -> Tensor:
        """Run one full training step; return the detached loss, the mean over micro-batches, a scalar on the device.

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
        """Return one micro-batch's loss under the dtype mode's autocast, ready for backward."""
        on_device = self._on_device(batch)
        with autocast(self.settings.dtype, self.device.type):
            return self.loss_fn(self._forward(*on_device.inputs), on_device.targets)

    def _on_device(self, batch: Batch) -> Batch:
        return batch.to(self.device, parameter_dtype(self.settings.dtype))


def create(settings: Settings) -> Workload:
    """Build the model on its device from the seed, and the optimizer. The global generators are left unchanged.

    Raises:
        WorkloadError: The device does not exist on this machine.
    """
    definition = DEFINITIONS[settings.WORKLOAD]
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
    """Let only the last micro-batch communicate gradients, if the model's wrapper has a switch for it."""
    if hasattr(model, "set_requires_gradient_sync"):  # FSDP2
        model.set_requires_gradient_sync(last)
    elif hasattr(model, "no_sync") and not last:  # DDP, FSDP1
        context: AbstractContextManager[Any] = model.no_sync()
        return context
    return nullcontext()


def make_optimizer(kind: OptimizerKind, model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer of all parameters; those with sparse gradients form a second group without momentum."""
    sparse = {id(module.weight) for module in model.modules() if getattr(module, "sparse", False)}
    dense_group = {"params": [value for value in model.parameters() if id(value) not in sparse]}
    sparse_group = {"params": [value for value in model.parameters() if id(value) in sparse], "momentum": 0.0}
    return _MAKERS[kind]([dense_group, sparse_group] if sparse else [dense_group])


def parameter_count(parameters: Iterable[torch.Tensor]) -> int:
    """Return the number of trainable parameters; a shared tensor counts once."""
    return sum(tensor.numel() for tensor in {id(tensor): tensor for tensor in parameters}.values())


def parameter_dtype(mode: DtypeMode) -> torch.dtype:
    """Return the type of parameters and floating-point inputs."""
    return torch.bfloat16 if mode is DtypeMode.BF16 else torch.float32


def autocast(mode: DtypeMode, device_type: str) -> AbstractContextManager[Any]:
    """Enable autocast in ``bf16-autocast``, for forward and loss; do nothing in the other modes."""
    if mode is not DtypeMode.BF16_AUTOCAST:
        return nullcontext()
    context: AbstractContextManager[Any] = torch.autocast(device_type, dtype=torch.bfloat16)
    return context


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Give new floating-point tensors this type. (Casting a finished model sometimes fails with fake tensors.)"""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def tf32(enabled: bool) -> Iterator[None]:
    """Turn TF32 on or off for matrix products, convolutions and RNNs; every switch is restored at the end.

    The switches are set through the older interface, which all supported versions have and which also sets the newer
    ``fp32_precision`` (torch 2.9 on). Reading the older one is an error if a caller has used the newer, so reading is
    guarded and both are restored, older first. Correct switches are not touched: a caller for whom 10 µs a step matter
    holds ``tf32`` around the whole loop.
    """
    cudnn = torch.backends.cudnn
    wanted = "high" if enabled else "highest"
    try:
        precision, convolutions = torch.get_float32_matmul_precision(), cudnn.allow_tf32
    except RuntimeError:  # set through the newer interface, and only that must be restored
        precision, convolutions = "highest", True
    else:
        if (precision, convolutions) == (wanted, enabled):
            yield
            return
    parts = [(backend, name) for backend, name in _PARTS if hasattr(getattr(backend, name, None), "fp32_precision")]
    newer = [(getattr(backend, name), getattr(backend, name).fp32_precision) for backend, name in parts]
    torch.set_float32_matmul_precision(wanted)  # not `allow_tf32`, which does not set the CPU's switch
    cudnn.allow_tf32 = enabled
    for part, _ in newer:
        part.fp32_precision = "tf32" if enabled else "ieee"  # if the older one defers to another
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        cudnn.allow_tf32 = convolutions
        for part, value in newer:
            part.fp32_precision = value
