"""A workload as one stage of a pipeline, run in the 1F1B schedule of ``torch.distributed.pipelining``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tracer.fake_world.errors import FakeWorldError
from tracer.parallel_plan import MeshPlace, ParallelPlan
from tracer.workloads.data import StepBatch
from tracer.workloads.settings import DtypeMode
from tracer.workloads.workload import Workload, autocast, parameter_dtype, tf32


class PipelineWorkload(Workload):
    """A ``Workload`` whose step is this rank's part of a pipeline's step.

    ``model`` and ``optimizer`` are the stage's, ``parameters`` counts the whole model's. Every rank draws the whole
    batch; the first stage uses its inputs, the last its targets.
    """

    def __init__(self, whole: Workload, stage: nn.Module, plan: ParallelPlan, place: MeshPlace, group: Any) -> None:
        """``stage`` is the module, wrapped or sharded already; ``group`` the process group of the stages."""
        try:
            from torch.distributed.pipelining import PipelineStage, Schedule1F1B
        except ImportError as error:
            raise FakeWorldError("This torch has no torch.distributed.pipelining, which a pipeline needs.") from error
        self.__dict__.update(whole.__dict__)
        self._use(stage)
        self.is_first, self.is_last = place.pp == 0, place.pp == plan.pp - 1
        inputs, outputs = _examples(whole.settings, plan, self.is_first, self.is_last)
        self._schedule = Schedule1F1B(
            PipelineStage(self.model, place.pp, plan.pp, self.device, input_args=inputs, output_args=outputs,
                          group=group),
            plan.passes, loss_fn=self._part_loss)
        self._unknown = torch.full((), torch.nan)

    def step(self, batch: StepBatch) -> Tensor:
        """One step; the loss is known to the last stage, the others return NaN."""
        if not self._started:
            torch.manual_seed(self.settings.seed)
            self._started = True
        micro_batch = batch[0].to(self.device, parameter_dtype(self.settings.dtype))
        losses: list[Tensor] = []
        with tf32(self.settings.dtype is DtypeMode.TF32):
            self.optimizer.zero_grad(set_to_none=True)
            inputs = micro_batch.inputs if self.is_first else ()
            if self.is_last:
                self._schedule.step(*inputs, target=micro_batch.targets, losses=losses)
            else:
                self._schedule.step(*inputs)
            self.optimizer.step()
        return torch.stack(losses).detach().mean() if losses else self._unknown

    def _part_loss(self, output: Tensor, targets: Tensor) -> Tensor:
        with autocast(self.settings.dtype, self.device.type):
            return self.loss_fn(output, targets)


def _examples(settings: Any, plan: ParallelPlan, first: bool, last: bool) -> tuple[Tensor, Tensor]:
    """Return what a stage of a language model takes and gives for one micro-batch, as tensors without memory.

    Without them the stages would ask one another, and in a fake world nobody answers.
    """
    rows, dtype = settings.batch // plan.passes, parameter_dtype(settings.dtype)
    features = torch.empty(rows, settings.seq, settings.width, dtype=dtype, device="meta", requires_grad=True)
    text = torch.empty(rows, settings.seq, dtype=torch.int64, device="meta")
    cast = torch.bfloat16 if settings.dtype is DtypeMode.BF16_AUTOCAST else dtype
    logits = torch.empty(rows, settings.seq, settings.vocabulary, dtype=cast, device="meta", requires_grad=True)
    return text if first else features, logits if last else features
