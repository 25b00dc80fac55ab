"""Peak memory of published training steps against what a plan's stages are said to hold, and published plans refused.

    python benchmarks/llm_memory.py [DATA] [--rows peaks|fits|all]

DATA (default: the environment's FORETRACE_DATA, else the shared data beside the checkout) is a folder with
`end_to_end/`: `simumax_b200.parquet` (`simumax.py` reads it), `megatron_lm_ci_step_times.parquet` (golden values of
Megatron-LM's functional tests, github.com/NVIDIA/Megatron-LM), and the tables that `weak_scaling.py` and `vtrain.py`
read.

peaks: both tables publish PyTorch's `max_memory_allocated` of a rank, so that contexts, NCCL's buffers and what the
allocator holds without use are not in it; they are compared with `StageMemory.allocated`: of the fullest stage, and for
the CI's rows of the last one, whose last rank alone writes Megatron-LM's log (megatron/training/global_vars.py).
What the CI's rows do not say is Megatron-LM's default (a GPT with biases, learned positions, tied embeddings, dropout
0.1, GPT-2's vocabulary padded for its shards, an expert's width four times the model's, loss in steps, 8 GPUs) or in
its test's `model_config.yaml`: attention is not fused where a test is no "resume" one or needs no Transformer Engine;
with context parallelism it always is, for which Transformer Engine has no other.
Release tests' replicas are the power of two at which what stays allocated after a step (another column) is nearest.

Nothing is fitted to a row. What a stage holds was however completed by reading Transformer Engine's and Megatron-Core's
sources with SimuMax's rows at hand; the CI's were looked at after, and told which rank is logged and where attention is
fused. `ERROR` of `parallel/memory.py` was set after all of them were seen.

fits: plans that ran, and whether they are refused: asked none.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import simumax
from weak_scaling import dgx_jobs, mpt_jobs

from graph_predictor.request.memory_fit import ERROR, Fit, StageMemory, fit_of
from kernel_models.collectives import find_topology
from kernel_models.device import device
from planner.parallel.decoder import check_decoder_plan
from planner.parallel.layer_costs import LayerCosts
from planner.parallel.memory import fullest_of, stage_memory, state_of
from tracer.errors import ForetraceError
from tracer.parallel_plan import ParallelPlan, Recomputation, Schedule, Sharding
from tracer.shape_only.transformer import Latent, TransformerShape

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(os.environ.get("FORETRACE_DATA", ROOT.parent / "shared" / "data"))
GPT2_VOCABULARY = 50_257
GPUS = 8
LARGE_GIB = 10
UNREAD = {
    "another optimizer": "muon", "another sharding than the table says": "reshard|fsdp|zp_z3",
    "layers spread as the table does not say": "uneven|account_for", "fp8": "fp8", "CUDA graphs": "cudagraph",
    "offloading": "offload", "reinforcement learning": "grpo", "gradient checks": "check_grads",
    "what is recomputed is not said": "selective_recompute", "latent attention's sizes are not said": "_mla",
    "fused operators of a kind of their own": "op_fuser", "half of the weights frozen": "frozen",
    "gradients of the embedding put off": "defer_embedding"}
"""Tests that are left out, by a pattern of their names, and why."""
MIXTRAL = {"rms": True, "gated": True, "bias": False, "rotary": True, "dropout": 0.0}
RELEASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gpt/gpt3_15b_8t_release": ({"bias": False, "rotary": True, "dropout": 0.0, "vocab": 256_000}, {}),
    "gpt/gpt3_15b_8t_release_sm": ({"bias": False, "rotary": True, "dropout": 0.0, "vocab": 256_000}, {}),
    "gpt/gpt3_15b_8t_release_sm_gb200": (
        {"bias": False, "rotary": True, "dropout": 0.0, "vocab": 256_000, "fused_loss": True}, {}),
    "mixtral/mixtral_8x22b_tp2pp8ep8vpp1_release": ({**MIXTRAL, "vocab": 32_000}, {}),
    "mixtral/mixtral_8x7b_alltoall_tp2pp4ep4_release": ({**MIXTRAL, "vocab": 256_000}, {}),
    "mixtral/mixtral_8x7b_tp1pp4ep8vpp8_release": ({**MIXTRAL, "vocab": 32_000}, {"etp": 1}),
}
"""Of release tests, what their `model_config.yaml` says beyond the table: of the model and of the plan."""


def number(row: dict[str, Any], key: str, default: int) -> int:
    """Return a whole number of a row; the table has some as text, such as "8.0"."""
    value = row[key]
    return default if value is None or value != value else int(float(value))


def switched(row: dict[str, Any], key: str) -> bool:
    """Return whether a row has something on."""
    return str(row[key]).lower() == "true"


@dataclass(frozen=True)
class Peak:
    """A published peak: GiB, and the stage that is said to hold most."""

    name: str
    family: str
    measured: float
    found: StageMemory

    @property
    def gib(self) -> float:
        """Predicted."""
        return self.found.allocated / 2**30

    @property
    def error(self) -> float:
        """Predicted over published, less one."""
        return self.gib / self.measured - 1


def ci_plan(row: dict[str, Any], name: str, gpus: int) -> ParallelPlan:
    """Return the plan of a test."""
    def size(key: str) -> int:
        return number(row, key, 1)

    tp, pp, cp = size("tp"), size("pp"), size("cp")
    dp = max(gpus // (tp * pp * cp), 1)
    deep = number(row, "vpp_layers", 0)
    chunks = size("layers") // pp // deep if deep else 1
    if "memory_speed" in name and size("experts") > 1:
        chunks = 4  # --num-virtual-stages-per-pipeline-rank of its file
    extra = RELEASES.get(name, ({}, {}))[1]
    etp = {"etp": 1} if "etp1" in name and tp > 1 else {}
    return ParallelPlan(
        dp=dp, tp=tp, pp=pp, cp=cp, ep=size("ep"), microbatch=size("mbs"), microbatches=max(
            size("gbs") // size("mbs") // dp, 1), chunks=chunks,
        schedule=Schedule.INTERLEAVED if chunks > 1 else Schedule.ONE_F_ONE_B,
        sharding=Sharding.OPTIMIZER if switched(row, "dist_opt") else Sharding.NONE,
        replicate=2 if "multi_dist_optimizer_instances" in name else 1,
        sequence_parallel=switched(row, "sp") and tp > 1,
        recompute=Recomputation.FULL if row["recompute"] == "full" else Recomputation.NONE, **{**etp, **extra})


def ci_shape(row: dict[str, Any], name: str, tp: int) -> TransformerShape:
    """Return the model of a test: Megatron-LM's defaults, and what the name or the test's file says."""
    hidden, heads = number(row, "hidden", 1), number(row, "heads", 1)

    def known(key: str, default: int) -> int:
        return number(row, key, default)

    unit = 128 * tp
    vocab = -(-known("vocab", GPT2_VOCABULARY) // unit) * unit
    small = "gpt3_mcore" in name
    experts = known("experts", 0)
    values: dict[str, Any] = {
        "gated": "swiglu" in name, "bias": "disable_bias_linear" not in name and not experts,
        "rotary": "rope" in name, "tied": small and "untie" not in name, "dropout": 0.1, "fused_loss": False,
        "qk_norm": "qk_layernorm" in name, "experts": experts, "top_k": known("topk", 1 if experts else 0),
        "flash": not small or number(row, "cp", 1) > 1 or ("resume" in name and "_te_" in name),
        "fused": "no_fusion" not in name}
    if "memory_speed" in name and experts:
        return replace(_latent_proxy(row, vocab), flash=False)
    values.update(RELEASES.get(name, ({}, {}))[0])
    vocab = values.pop("vocab", vocab)
    return TransformerShape(
        number(row, "layers", 1), hidden, heads, known("kv_groups", heads), known("ffn", 4 * hidden),
        -(-vocab // unit) * unit, number(row, "seq", 1), **values)


def _latent_proxy(row: dict[str, Any], vocab: int) -> TransformerShape:
    """The small DeepSeek-like model of the tests' `*_memory_speed`: one dense block, then experts, one prediction."""
    heads = number(row, "heads", 1)
    dense = TransformerShape(
        1, number(row, "hidden", 1), heads, heads, 4096, -(-vocab // 3232) * 3232, number(row, "seq", 1),
        gated=True, rms=True, bias=False, rotary=True, latent=Latent(1536, 512, 128, 64, 128), fused_loss=False,
        flash=False)
    routed = replace(dense, layers=15, ffn=1024, experts=32, top_k=4, shared_ffn=1024)
    return replace(routed, layers=16, predictions=1, stack=(dense, routed))


def read_ci(path: Path, pieces: LayerCosts) -> tuple[list[Peak], dict[str, int]]:
    """Return the peaks of the CI's table, and how many rows are left out for what reason."""
    peaks: list[Peak] = []
    left: dict[str, int] = {}
    known: dict[tuple[ParallelPlan, TransformerShape], StageMemory] = {}
    for row in pd.read_parquet(path).to_dict("records"):
        name = row["test"]
        reason = _left_out(row, name)
        try:
            if reason is None:
                tp = number(row, "tp", 1)
                shape, gpus = ci_shape(row, name, tp), _gpus(row, name)
                plan = (_released(row, name, shape) if name in RELEASES else ci_plan(row, name, gpus))
                check_decoder_plan(plan, shape, find_topology("dgx-h100x512"))
                if (plan, shape) not in known:
                    known[plan, shape] = stage_memory(plan, shape, pieces, plan.pp - 1)
                peaks.append(Peak(f"{name} {row['platform']}", _family(name), float(row["max_alloc_gib"]),
                                  known[plan, shape]))
        except ForetraceError as error:
            reason = str(error)
        if reason is not None:
            left[reason] = left.get(reason, 0) + 1
    return peaks, left


def _left_out(row: dict[str, Any], name: str) -> str | None:
    if row["max_alloc_gib"] is None or row["max_alloc_gib"] != row["max_alloc_gib"]:
        return "no peak"
    if name in RELEASES or "memory_speed" in name:
        return None
    if not re.match(r"(gpt|moe)/gpt3(_moe)?_mcore", name):
        return "no decoder, or one whose sizes the table does not have"
    return next((reason for reason, pattern in UNREAD.items() if re.search(pattern, name)), None)


def _gpus(row: dict[str, Any], name: str) -> int:
    return GPUS // 2 if "1node" in name else GPUS


def _family(name: str) -> str:
    if name in RELEASES:
        return "CI, releases"
    if "memory_speed" in name:
        return "CI, memory tests"
    return "CI, small MoE" if name.startswith("moe/") else "CI, small GPT"


def _released(row: dict[str, Any], name: str, shape: TransformerShape) -> ParallelPlan:
    """Return the plan whose replicas leave most nearly as much allocated as the row says."""
    least = ci_plan(row, name, 1)
    once = least.tp * least.pp * least.cp
    plans = [ci_plan(row, name, once * 2**power) for power in range(2, 9)]
    def away(plan: ParallelPlan) -> float:
        held = max(state_of(plan, shape, stage).total - state_of(plan, shape, stage).buffers
                   for stage in (0, plan.pp - 1))
        return abs(held / 2**30 - float(row["alloc_gib"]))
    return min(plans, key=away)


def read_simumax(path: Path, pieces: LayerCosts) -> list[Peak]:
    """Return the peaks of SimuMax's table."""
    return [Peak(row.case, f"SimuMax {row.family}", row.measured_gib, fullest_of(row.plan, row.shape, pieces))
            for row in simumax.read(path)]


def show_peaks(peaks: Sequence[Peak], left: dict[str, int]) -> None:
    """Print every peak, and errors by family."""
    print(f"{'row':100}{'published':>10}{'predicted':>10}{'error':>8}  fullest")
    for each in peaks:
        print(f"{each.name:100}{each.measured:>10.3f}{each.gib:>10.3f}{each.error:>+8.1%}  stage {each.found.stage}, "
              f"{each.found.moment}")
    for reason, count in left.items():
        print(f"{count} rows left out: {reason}")
    print()
    for family in dict.fromkeys(each.family for each in peaks):
        _line(family, [each for each in peaks if each.family == family])
    for name in ("SimuMax", "CI", ""):
        _line(f"{name or 'all'}, all" if name else "all", [each for each in peaks if each.family.startswith(name)])
    large = [each for each in peaks if each.measured > LARGE_GIB]
    _line(f"above {LARGE_GIB} GiB", large)
    far = sum(abs(each.error) > ERROR for each in large)
    print(f"\nOf the {len(large)} above {LARGE_GIB} GiB {far} are further off than ERROR, {ERROR:.0%}.")


def _line(name: str, peaks: Sequence[Peak]) -> None:
    error = 100 * np.array([each.error for each in peaks])
    size = np.abs(error)
    print(f"{name:22}{len(peaks):>4} rows  MAPE {size.mean():5.1f}%  median {np.median(size):5.1f}%  bias "
          f"{error.mean():+6.1f}%  p90 {np.quantile(size, 0.9):5.1f}%  largest {size.max():5.1f}%")


def show_fits(data: Path) -> None:
    """Print which plans that ran are refused."""
    folder = data / "end_to_end"
    jobs = [(job.name, job.series, job.plan, job.shape, job.device) for job in (
        *dgx_jobs(folder / "dgxc_step_times.parquet"), *mpt_jobs(folder / "mosaic_mpt_fsdp.parquet"))]
    jobs += [(row.case, "SimuMax", row.plan, row.shape, "b200") for row in simumax.read(data)]
    for name, recompute in (("single", Recomputation.NONE), ("multi", Recomputation.FULL)):
        jobs += _vtrain(folder / f"vtrain_{name}_node_a100.parquet", name, recompute)
    counts: dict[str, dict[Fit, int]] = {}
    pieces: dict[str, LayerCosts] = {}
    known: dict[tuple[ParallelPlan, TransformerShape, str], StageMemory] = {}
    for name, series, plan, shape, on in jobs:
        spec = device(on)
        key = replace(plan, microbatches=min(plan.passes, 2 * plan.pp * plan.chunks)), shape, on
        if key not in known:
            known[key] = fullest_of(key[0], shape, pieces.setdefault(on, LayerCosts(spec)))
        found, fit = known[key], fit_of(known[key], spec.memory_gb * 1e9)
        table = series.split("/")[0] if "/" in series else series.split(" ")[0]
        mine = counts.setdefault(f"{table} on {on}", dict.fromkeys(Fit, 0))
        mine[fit] += 1
        if fit is not Fit.FITS:
            print(f"{fit.value:12} {name:46} {found.low / 1e9:6.1f} – {found.high / 1e9:6.1f} GB of "
                  f"{spec.memory_gb:5.1f} ({found.account.total / 1e9:.1f} expected): {plan}")
    print()
    for table, mine in counts.items():
        print(f"{table:44}" + "  ".join(f"{fit.value} {count}" for fit, count in mine.items()))
    print(f"{'all':44}" + "  ".join(f"{fit.value} {sum(mine[fit] for mine in counts.values())}" for fit in Fit))


def _vtrain(path: Path, name: str, recompute: Recomputation) -> list[tuple[str, str, ParallelPlan, TransformerShape,
                                                                          str]]:
    jobs = []
    for r in pd.read_parquet(path).to_dict("records"):
        hidden, heads, layers = int(r["hidden size"]), int(r["attention heads"]), int(r["# layers"])
        shape = TransformerShape(layers, hidden, heads, heads, 4 * hidden, 51_200, int(r["sequence length"]),
                                 flash=False, dropout=0.1, fused_loss=False, dtype="fp16")
        dp, micro = int(r["data parallelism"]), int(r["micro batch"])
        try:
            plan = ParallelPlan(dp=dp, tp=int(r["tensor parallelism"]), pp=int(r["pipeline parallelism"]),
                                microbatch=micro, microbatches=int(r["global batch"]) // dp // micro,
                                recompute=recompute)
            check_decoder_plan(plan, shape, find_topology("dgx-a100x512"))
        except ForetraceError:
            continue
        jobs.append((f"h{hidden} L{layers}", f"vTrain-{name} ", plan, shape, "a100-sxm-80g"))
    return jobs


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", type=Path, default=DATA)
    parser.add_argument("--rows", choices=["peaks", "fits", "all"], default="all")
    options = parser.parse_args()
    if options.rows != "fits":
        pieces = LayerCosts(device("b200"))
        found, left = read_ci(options.data / "end_to_end" / "megatron_lm_ci_step_times.parquet", pieces)
        show_peaks([*read_simumax(options.data, pieces), *found], left)
    if options.rows != "peaks":
        show_fits(options.data)


if __name__ == "__main__":
    main()
