"""The programs behind a table of step times: a model of timm in the loop its benchmark script runs.

Mixed precision (autocast to fp16), SGD with Nesterov momentum and cross entropy in training; no gradients in inference.
A model is traced by shapes at a batch that is a prime no other size is a multiple of, so that one trace gives the
operations of every batch (``Traced.at_batch``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tracer.errors import ForetraceError
from tracer.graph import ExecutionGraph
from zoo_parts.traced import BATCH, Traced, traced_of


@dataclass(frozen=True, slots=True, order=True)
class Program:
    """What is traced once.

    Attributes:
        kind: "train" or "infer".
        model: timm's name, with its tag where the table has one.
        image: pixels of a side.
        layout: "nchw" or "nhwc" (channels last).
        fused: whether attention is one operator; by hand before PyTorch 2.
        precision: "amp" or "fp32".
        merged: whether branches of a layer that inference can do as one are merged (timm's ``--reparam``).
    """

    kind: str
    model: str
    image: int
    layout: str = "nchw"
    fused: bool = True
    precision: str = "amp"
    merged: bool = False

    @property
    def architecture(self) -> str:
        """Name without the tag of its weights."""
        return self.model.partition(".")[0]

    @property
    def stem(self) -> str:
        """Name of its file in the cache."""
        attention = "fused" if self.fused else "by-hand"
        merged = "-merged" if self.merged else ""
        return f"{self.kind}-{self.architecture}-{self.image}-{self.layout}-{attention}-{self.precision}{merged}"


def trace(program: Program, device: str = "rtx-3090") -> Traced:
    """Trace a program.

    Raises:
        ForetraceError: it cannot be traced.
    """
    return traced_of(trace_graph(program, device))


def trace_graph(program: Program, device: str = "rtx-3090") -> ExecutionGraph:
    """The same as a graph, at batch ``BATCH``.

    Raises:
        ForetraceError: it cannot be traced.
    """
    from tracer.shape_only import trace_step

    training = program.kind == "train"
    return trace_step(lambda: step_of(program), device, warmup=1 if training else 0)


def merges(program: Program) -> bool:
    """Return whether a model has branches that inference can merge."""
    import torch

    with torch.device("meta"):
        model = _model(program)
    return any(hasattr(layer, name) for layer in model.modules()
               for name in ("fuse", "reparameterize", "switch_to_deploy"))


def step_of(program: Program, device: str = "cuda") -> Callable[[], Any]:
    """Make the step of a program on a device, "cuda" or "cpu"."""
    import timm
    import torch

    timm.layers.set_fused_attn(program.fused)
    model = _model(program)
    if program.merged:
        model = timm.utils.reparameterize_model(model.eval(), inplace=True)
    model = model.to(device)
    images = torch.randn(BATCH, 3, program.image, program.image, device=device)
    if program.layout == "nhwc":
        model = model.to(memory_format=torch.channels_last)
        images = images.contiguous(memory_format=torch.channels_last)
    autocast = torch.autocast(device, dtype=torch.float16, enabled=program.precision == "amp")
    if program.kind == "infer":
        model.eval()

        def infer() -> None:
            with torch.no_grad(), autocast:
                model(images)

        return infer
    model.train()
    # As PyTorch 1.12 ran it: one parameter after the other, and gradients zeroed rather than dropped.
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, nesterov=True, foreach=False)
    targets = torch.zeros(BATCH, dtype=torch.long, device=device)

    def train() -> None:
        optimizer.zero_grad(set_to_none=False)
        with autocast:
            out = model(images)
        if isinstance(out, (tuple, list)):
            out = out[0]
        torch.nn.functional.cross_entropy(out, targets).backward()
        optimizer.step()

    return train


def _model(program: Program) -> Any:
    """The model with random weights; of this image size where its own is another."""
    import timm

    names = dict.fromkeys((program.model, program.architecture))
    errors = []
    for name in names:
        for sized in (False, True):
            try:
                model = timm.create_model(name, pretrained=False, **({"img_size": program.image} if sized else {}))
            except (RuntimeError, TypeError, AssertionError, ValueError, KeyError) as error:
                errors.append(error)
                continue
            own = model.pretrained_cfg.get("input_size", (3, 0, 0))[-1]
            if sized or own == program.image or not model.pretrained_cfg.get("fixed_input_size", False):
                return model
    raise ForetraceError(f"timm makes no {program.model} for images of {program.image}: {errors[-1:]}")
