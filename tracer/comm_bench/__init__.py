"""A sweep of collectives under ``torchrun``: NCCL on GPUs, gloo on CPUs. The result is a table of JSON lines."""

from tracer.comm_bench.runner import BENCH_KINDS, BenchPlan, run_bench, sweep_sizes

__all__ = ["BENCH_KINDS", "BenchPlan", "run_bench", "sweep_sizes"]
