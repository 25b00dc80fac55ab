"""The split of the suite's Llama: by tensor parallelism within its layers, and into pipeline stages."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.style import ParallelStyle

from tracer.fake_world.fit import stage_sizes
from tracer.workloads.models.language import Llama
from tracer.workloads.models.parts import run_block
from tracer.workloads.settings import Settings
from tracer.workloads.workload import autocast


class _Replicated(ParallelStyle):
    """A layer that every rank computes completely. Its parameters become DTensors like all others, so that an optimizer
    may update them in one ``foreach`` call. Neither forward nor backward communicates."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def whole(_: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
            return (DTensor.from_local(inputs[0], mesh, (Replicate(),), run_check=False), *inputs[1:])

        def local(_: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
            return output.to_local()

        return distribute_module(module, device_mesh, None, whole, local)


def split_layers(model: nn.Module, mesh: DeviceMesh) -> None:
    """Split a Llama, or a stage of it, over a mesh of one dimension, in place, by the plan of Megatron-LM.

    By columns: ``q``, ``k``, ``v``, ``gate``, ``up``, the head. By rows: ``out``, ``down``, the embedding's vocabulary.
    A block has two all-reduces in forward and two in backward, the embedding has one, and logits have an all-gather.
    """
    replicate = Replicate()
    if isinstance(getattr(model, "tokens", None), nn.Embedding):
        parallelize_module(model, mesh, {"tokens": RowwiseParallel(input_layouts=replicate)})
    if isinstance(getattr(model, "head", None), nn.Linear):
        parallelize_module(model, mesh, {"norm": _Replicated(), "head": ColwiseParallel(output_layouts=replicate)})
    blocks: Any = model.blocks
    for block in blocks:
        parallelize_module(block, mesh, {
            "attention_norm": _Replicated(),
            # Once for all of its layers, so that their input gradients are reduced together.
            "attention": PrepareModuleInput(input_layouts=(replicate, None, None),
                                            desired_input_layouts=(replicate, None, None)),
            "attention.q": ColwiseParallel(), "attention.k": ColwiseParallel(), "attention.v": ColwiseParallel(),
            "attention.out": RowwiseParallel(),
            "forward_norm": _Replicated(),
            "feed_forward": PrepareModuleInput(input_layouts=(replicate,), desired_input_layouts=(replicate,)),
            "feed_forward.gate": ColwiseParallel(), "feed_forward.up": ColwiseParallel(),
            "feed_forward.down": RowwiseParallel(),
        })


class LlamaStage(nn.Module):
    """One pipeline stage: tokens or features ``[batch, seq, width]`` in, features or logits out.

    Only its forward runs under the dtype mode's autocast, not its backward.
    """

    cosines: Tensor
    sines: Tensor

    def __init__(self, model: Llama, settings: Settings, stage: int, stages: int) -> None:
        super().__init__()
        self.settings = settings
        sizes = stage_sizes(len(model.blocks), stages)
        first = sum(sizes[:stage])
        self.checkpointing = model.checkpointing
        self.tokens = model.tokens if stage == 0 else None
        self.blocks = nn.ModuleList(list(model.blocks)[first:first + sizes[stage]])
        self.norm = model.norm if stage == stages - 1 else None
        self.head = model.head if stage == stages - 1 else None
        self.register_buffer("cosines", model.cosines, persistent=False)
        self.register_buffer("sines", model.sines, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Run the stage's part of the model."""
        with autocast(self.settings.dtype, x.device.type):
            if self.tokens is not None:
                x = self.tokens(x)
            for block in self.blocks:
                x = run_block(block, self.checkpointing, x, self.cosines, self.sines)
            return x if self.head is None or self.norm is None else self.head(self.norm(x))
