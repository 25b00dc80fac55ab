"""``parallelize``: spread a workload of the suite by a plan, in a fake world or in real process groups."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from tracer.fake_world import splits
from tracer.fake_world.fit import check_plan
from tracer.fake_world.llama import LlamaStage, split_layers
from tracer.fake_world.shims import outside_fake_mode
from tracer.parallel_plan import ParallelPlan, PlanError
from tracer.workloads.models.sharded_tables import ShardedTables, sharded_parameters
from tracer.workloads.places import pieces_of
from tracer.workloads.workload import Workload


def parallelize(workload: Workload, plan: ParallelPlan) -> Workload:
    """Reduce a workload to this rank's part of it under a plan, and return it.

    Layers are split first (tensor and expert parallelism), then stages are cut (pipeline), then replicas are wrapped:
    DDP around the model, or FSDP2's ``fully_shard`` on each block and on the model. Batches are the same on every rank.

    Args:
        workload: a workload from ``workloads.build``; it is changed, and must not be used in other ways afterwards.

    Returns:
        The workload, or a ``PipelineWorkload`` or ``LookaheadWorkload`` with the same ``step`` and ``batches``.

    Raises:
        PlanError: the plan does not fit the workload or the existing process groups.
    """
    check_plan(workload.settings, plan)
    if not dist.is_initialized() or dist.get_world_size() != plan.world_size:
        have = dist.get_world_size() if dist.is_initialized() else "no"
        raise PlanError(f"The plan {plan} is for {plan.world_size} ranks and there are {have}; use "
                             f"fake_world({plan.world_size}) or start as many processes.")
    mesh = _mesh(workload.device.type, plan)
    place = plan.place(dist.get_rank())
    model = workload.model
    if plan.tp > 1:
        split_layers(model, _part(mesh, "tp"))
    if plan.pp > 1:
        stage = LlamaStage(model, workload.settings, place.pp, plan.pp)  # type: ignore[arg-type]
        return splits.PipelineWorkload(workload, _replicate(stage, list(stage.blocks), plan, mesh), plan, place,
                                       _part(mesh, "pp").get_group())
    if plan.ep > 1:
        return workload.wrap(lambda whole: _with_experts(whole, workload, plan, mesh, place.dp))
    if getattr(workload.settings, "sharding", ""):
        spread = workload.wrap(lambda whole: _with_sharded_tables(whole, workload, plan, mesh))
        if not getattr(workload.settings, "pipelined", False):
            return spread
        return splits.LookaheadWorkload(spread, model.tables)  # type: ignore[arg-type]
    return workload.wrap(lambda whole: _replicate(whole, workload.blocks, plan, mesh))


def _with_sharded_tables(model: Any, workload: Workload, plan: ParallelPlan, mesh: Any) -> nn.Module:
    """Spread tables over the replicas; each replica has all other parts of the model."""
    settings: Any = workload.settings
    tables = settings.embedding_tables()
    pieces = pieces_of(tables, settings.sharding, plan.dp)
    with torch.device(workload.device):
        model.tables = ShardedTables(tables, pieces, settings.batch, sparse=settings.sparse,
                                     batched=settings.batched, group=_part(mesh, "dp").get_group())
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, sharded_parameters(model))
    return _replicate(model, workload.blocks, plan, mesh)


def _with_experts(model: nn.Module, workload: Workload, plan: ParallelPlan, mesh: Any, place: int) -> nn.Module:
    """Spread experts over groups of ``ep`` neighbours among the replicas, and the rest over all replicas."""
    with outside_fake_mode():
        groups = init_device_mesh(workload.device.type, (plan.dp // plan.ep, plan.ep), mesh_dim_names=("copies", "ep"))
    count: int = workload.settings.experts  # type: ignore[attr-defined]
    spread = splits.spread_experts(model, count, plan.ep, place % plan.ep, groups["ep"].get_group())
    if plan.fsdp2:
        splits.shard_experts(spread, groups["copies"], plan.dp)
        return _replicate(model, workload.blocks, plan, mesh)
    splits.replicate_experts(spread, groups["copies"].get_group(), plan.dp // plan.ep, **_bucket_size(plan))
    splits.ignore_experts(model)
    return splits.DataParallelWithExperts(model, process_group=_part(mesh, "dp").get_group(), **_bucket_size(plan))


def _mesh(device_type: str, plan: ParallelPlan) -> Any:
    with outside_fake_mode():
        return init_device_mesh(device_type, tuple(plan.mesh.values()), mesh_dim_names=tuple(plan.mesh))


def _part(mesh: Any, name: str) -> Any:
    return mesh if mesh.mesh_dim_names == (name,) else mesh[name]


def _replicate(model: nn.Module, blocks: list[nn.Module], plan: ParallelPlan, mesh: Any) -> nn.Module:
    if plan.ddp:
        size = _bucket_size(plan)
        if plan.tp > 1:  # given the mesh, DDP makes the DTensors local ones
            return DistributedDataParallel(model, device_mesh=_part(mesh, "dp"), **size)
        return DistributedDataParallel(model, process_group=_part(mesh, "dp").get_group(), **size)
    if plan.fsdp2:
        try:
            from torch.distributed.fsdp import fully_shard
        except ImportError:  # torch 2.5
            from torch.distributed._composable.fsdp import fully_shard
        for block in blocks:
            fully_shard(block, mesh=_part(mesh, "dp"))
        fully_shard(model, mesh=_part(mesh, "dp"))
    return model


def _bucket_size(plan: ParallelPlan) -> dict[str, Any]:
    """Return DDP's option for the bucket size. If it is given, the first bucket is as large as the others."""
    return {} if plan.bucket_mb is None else {"bucket_cap_mb": plan.bucket_mb}
