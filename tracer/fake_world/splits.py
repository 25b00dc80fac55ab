"""Workloads spread over ranks: experts, pipeline stages, and look-ups that are distributed ahead.

Experts are laid out as follows::

    [experts, places, width]                    questions of this rank's tokens
         │ all-to-all
    [own experts, ranks × places, width]        questions of all ranks of the group
         │ own experts
         │ all-to-all
    [experts, places, width]                    answers

The ``ep`` ranks of a group are neighbours, and each has its own experts. The experts are replicated or sharded over the
``dp / ep`` ranks with the same experts, all other parameters over all data-parallel ranks, as in torchtitan and
Megatron-LM.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.nn.parallel import DistributedDataParallel

from tracer.fake_world.fit import FakeWorldError
from tracer.parallel_plan import MeshPlace, ParallelPlan
from tracer.workloads.models.parts import Batch, StepBatch
from tracer.workloads.models.sharded_tables import ShardedTables
from tracer.workloads.settings import DtypeMode
from tracer.workloads.workload import Workload, autocast, parameter_dtype, tf32


class SpreadExperts(nn.Module):
    """Holds this rank's experts in place of all experts: ``[experts, places, width]`` → the same shape."""

    def __init__(self, experts: nn.Module, count: int, ranks: int, place: int, group: Any) -> None:
        """``experts`` is changed: its parameters have the ``count`` experts as first dimension."""
        super().__init__()
        self.ranks, self.group = ranks, group
        own = count // ranks
        for name, whole in list(experts.named_parameters(recurse=False)):
            setattr(experts, name, nn.Parameter(whole.detach()[place * own:(place + 1) * own].clone()))
        self.experts = experts

    def forward(self, x: Tensor) -> Tensor:
        """Send places to the ranks with their experts, and return the answers."""
        count, places, width = x.shape
        asked = self._exchange(x).unflatten(0, (self.ranks, count // self.ranks)).transpose(0, 1).flatten(1, 2)
        answers = self.experts(asked).unflatten(1, (self.ranks, places)).transpose(0, 1)
        return self._exchange(answers.reshape(count, places, width))

    def _exchange(self, x: Tensor) -> Tensor:
        return all_to_all_single_autograd(x.contiguous(), None, None, self.group)


class DataParallelWithExperts(DistributedDataParallel):
    """DDP of everything except the experts, which may each have their own DDP: ``no_sync`` covers both."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Skip the reduction as ``DistributedDataParallel`` does, for the experts too."""
        with ExitStack() as stack:
            for part in self.module.modules():
                if isinstance(part, DistributedDataParallel):
                    stack.enter_context(part.no_sync())
            stack.enter_context(super().no_sync())
            yield


def spread_experts(model: Any, count: int, ranks: int, place: int, group: Any) -> list[SpreadExperts]:
    """Keep in each block, in place, only the experts of one place of an expert-parallel group."""
    found = []
    for block in model.blocks:
        part = block.feed_forward
        part.experts = SpreadExperts(part.experts, count, ranks, place, group)
        found.append(part.experts)
    return found


def replicate_experts(spread: list[SpreadExperts], group: Any, copies: int, **options: Any) -> None:
    """Average the gradients of equal experts over the ``copies`` ranks that have them, by DDP."""
    for part in spread:
        # Each rank's loss is a mean over its own tokens, and the gradients of all the group's ranks are added here.
        for weight in part.experts.parameters():
            weight.register_hook(lambda gradient, ranks=part.ranks: gradient / ranks)
        if copies > 1:
            part.experts = DistributedDataParallel(part.experts, process_group=group, **options)


def shard_experts(spread: list[SpreadExperts], mesh: Any, ranks: int) -> None:
    """Shard equal experts over the ranks of ``mesh`` by FSDP2; ``ranks`` counts all data-parallel ranks."""
    from torch.distributed.fsdp import fully_shard

    for part in spread:
        sharded: Any = fully_shard(part.experts, mesh=mesh)
        divide = getattr(sharded, "set_gradient_divide_factor", None) or sharded.set_reduce_scatter_divide_factor
        divide(float(ranks))
        if dist.get_backend(mesh.get_group()) == "gloo":  # it cannot scale while it reduces
            sharded.set_force_sum_reduction_for_comms(True)


def expert_parameters(model: nn.Module) -> list[str]:
    """Return the names of the parameters of spread experts."""
    inside = [name for name, part in model.named_modules() if isinstance(part, SpreadExperts)]
    return [name for name, _ in model.named_parameters() if name.startswith(tuple(f"{each}." for each in inside))]


def ignore_experts(model: nn.Module) -> None:
    """Keep a DDP around the model from handling the experts."""
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, expert_parameters(model))


class PipelineWorkload(Workload):
    """A ``Workload`` whose step is this rank's part of a pipeline's step.

    ``model`` and ``optimizer`` are the stage's, ``parameters`` counts the whole model's. Every rank draws the whole
    batch; the first stage uses its inputs, the last its targets.
    """

    def __init__(self, whole: Workload, stage: nn.Module, plan: ParallelPlan, place: MeshPlace, group: Any) -> None:
        """``stage`` is the module, already wrapped or sharded; ``group`` is the process group of the stages."""
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
        """Run one step; the last stage returns the loss, the others NaN."""
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
    """Return input and output of a stage of a language model for one micro-batch, as tensors without memory.

    Without them the stages would ask each other, and in a fake world no other rank answers.
    """
    rows, dtype = settings.batch // plan.passes, parameter_dtype(settings.dtype)
    features = torch.empty(rows, settings.seq, settings.width, dtype=dtype, device="meta", requires_grad=True)
    text = torch.empty(rows, settings.seq, dtype=torch.int64, device="meta")
    cast = torch.bfloat16 if settings.dtype is DtypeMode.BF16_AUTOCAST else dtype
    logits = torch.empty(rows, settings.seq, settings.vocabulary, dtype=cast, device="meta", requires_grad=True)
    return text if first else features, logits if last else features


class LookaheadWorkload(Workload):
    """A ``Workload`` whose step copies the next micro-batch to the device and distributes its look-ups too.

    The next batch is known only if batches are used in the order in which ``batches`` yields them; any other batch is
    copied and distributed in its own step.
    """

    def __init__(self, whole: Workload, tables: ShardedTables) -> None:
        """``tables`` are those of the model."""
        self.__dict__.update(whole.__dict__)
        self._tables = tables
        self._following: Batch | None = None
        """The first micro-batch of the batch that follows the last yielded one."""
        self._coming: list[Batch] = []
        """Micro-batches after the current one."""
        self._copied: tuple[Batch, Batch] | None = None
        """The next micro-batch, on the host and on the device."""

    def batches(self) -> Iterator[StepBatch]:
        """Yield the same batches as without lookahead; the next batch is drawn one request earlier."""
        for batch, following in pairwise(super().batches()):
            self._following = following[0]
            yield batch

    def step(self, batch: StepBatch) -> Tensor:
        """Run one full training step, and distribute the next one's first look-ups."""
        self._coming = [*batch[1:], *([self._following] if self._following is not None else [])]
        self._following = None
        return super().step(batch)

    def _on_device(self, batch: Batch) -> Batch:
        copied, self._copied = self._copied, None
        own = copied[1] if copied is not None and copied[0] is batch else super()._on_device(batch)
        if self._coming:
            following = self._coming.pop(0)
            self._copied = following, super()._on_device(following)
            _, rows, starts = self._copied[1].inputs
            self._tables.announce(rows, starts)
        return own
