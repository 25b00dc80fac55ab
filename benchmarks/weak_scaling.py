"""Published step times of large jobs from shape-only graphs: how they grow with the job, and which is faster.

    python benchmarks/weak_scaling.py [DATA] [--rows mpt|dgx|recipes|experts] [--pairs]

DATA (default: the environment's FORETRACE_DATA, else the shared data beside the checkout) is a folder with
`end_to_end/mosaic_mpt_fsdp.parquet` (LLM-Foundry's benchmark tables, github.com/mosaicml/llm-foundry),
`end_to_end/dgxc_step_times.parquet` (github.com/NVIDIA/dgxc-benchmarking) and
`end_to_end/training_hopper_blackwell.csv` (Megatron-Bridge's performance summary, MLPerf logs and NeMo's page). Kernels
are priced by data sheets and default efficiencies, collectives by the topology's, `CorrectionFactors()` as they are;
what Blackwell's 8- and 4-bit products take of a board's power is fitted to rows marked "fitted"
(`kernel_models.pricing`), which the figures below a table leave out. Of the first table bf16 rows are read, of the
second pre-training rows whose model and plan are published (fine-tuning and Paxml's GPT are not), of the third the
pre-training rows of dense models, each of its newest release, and those of DeepSeek-V3, Qwen3 and GPT-OSS by what their
recipes switch on (``EXPERTS``). Of these the mechanisms were found on DeepSeek-V3, Qwen3 30B and GPT-OSS of H100 and
GB200; Qwen3 235B and all of B200, B300 and GB300 were held out.

Printed for each table: every row, MAPE, median, bias, p90 and largest error of the step time, how many lie inside the
80% interval, and Spearman's rank correlation over its rows; for jobs that only grow (same model, sequence and batch of
a GPU) the slope: the step time of the largest over the smallest, measured and predicted.

`--pairs` prints no rows but, of all pairs of rows of a table that differ in one setting, how often the sign of what it
changes is right (``signs``).
"""

from __future__ import annotations

import argparse
import csv
import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.stats import spearmanr

from graph_predictor.request.memory_fit import fit_of
from kernel_models.collectives import CollectiveModel, find_topology
from kernel_models.device import device
from planner.parallel.decoder import read_decoder
from planner.parallel.estimate import Estimate, estimate
from planner.parallel.layer_costs import LayerCosts
from planner.parallel.memory import fullest_of
from planner.parallel.plan_costs import costs_of_plan
from tracer.parallel_plan import ParallelPlan, Recomputation, Schedule, Sharding
from tracer.shape_only.transformer import TransformerShape

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(os.environ.get("FORETRACE_DATA", ROOT.parent / "shared" / "data"))
ASKED = 0.95

MPT = {"125m": (12, 768, 12), "350m": (24, 1024, 16), "760m": (24, 1536, 12), "1b": (24, 2048, 16),
       "3b": (32, 2560, 20), "7b": (32, 4096, 32), "13b": (40, 5120, 40), "30b": (48, 7168, 56), "70b": (80, 8192, 64)}
"""Layers, width and heads of LLM-Foundry's MPT models."""
GPUS = {"h100_80gb": ("h100-sxm", "dgx-h100", ""), "a100_80gb": ("a100-sxm-80g", "dgx-a100", "@roce-200"),
        "a100_40gb": ("a100-sxm-40g", "dgx-a100", "@roce-200")}
"""Device, node and network by the tables' names of GPUs."""


def _llama(layers: int, hidden: int, heads: int, ffn: int, vocab: int, seq: int) -> TransformerShape:
    return TransformerShape(layers, hidden, heads, 8, ffn, vocab, seq, gated=True, rms=True, bias=False, rotary=True)


LLAMA_70B = (80, 8192, 64, 28_672)
MEGATRON = {"sharding": Sharding.OPTIMIZER}
OVERLAPPED = {**MEGATRON, "sequence_parallel": True, "tensor_overlap": True}
"""The recipes with tensor parallelism switch userbuffers on (NVIDIA/dgxc-benchmarking: `ub_tp_comm_overlap: true` in
nemo_megatron/gpt3_175b_hydra.yaml, `userbuffers_bf16_h100_h8192_tp4_mbs1_seqlen8192` in llama3.1/pretrain_llama31.py).
"""
DGX: dict[tuple[str, str], tuple[TransformerShape, dict[str, object]]] = {
    ("v25.02", "llama3.1/README_70b.md"): (_llama(*LLAMA_70B, 128_256, 8192), {
        **OVERLAPPED, "tp": 4, "pp": 4, "cp": 2, "chunks": 5, "schedule": Schedule.INTERLEAVED}),
    ("v25.02", "llama3.1/README_8b.md"): (_llama(32, 4096, 32, 14_336, 128_256, 8192), {**MEGATRON, "cp": 2}),
    ("v25.02", "nemo_megatron/README_175b.md"): (
        TransformerShape(96, 12_288, 96, 96, 49_152, 51_200, 2048), {
            **OVERLAPPED, "tp": 4, "pp": 8, "chunks": 12, "schedule": Schedule.INTERLEAVED}),
    ("v24.11.1", "maxtext/README_70b.md"): (_llama(*LLAMA_70B, 32_000, 4096), {
        "microbatch": 2, "sharding": Sharding.PARAMETERS, "recompute": Recomputation.PROJECTIONS}),
    ("v25.02", "maxtext/README_70b.md"): (_llama(*LLAMA_70B, 128_256, 8192), {
        "microbatch": 2, "sharding": Sharding.PARAMETERS, "recompute": Recomputation.PROJECTIONS}),
}
"""Model and plan by release and file; micro-batches of 1 where nothing else is said. In fp8 Llama 3.1's gradients are
bf16 (`grad_reduce_in_fp32 = False` in llama3.1/pretrain_llama31.py)."""


MAXTEXT_SHARDED = 128
"""GPUs over which MaxText's recipe shards from 512 GPUs on; the others are copies. It keeps queries, keys and values
(NVIDIA/dgxc-benchmarking, maxtext/configure.sh: 16 nodes from 64 nodes on, ``save_qkv_proj``)."""


GPT3_175B = TransformerShape(96, 12_288, 96, 96, 49_152, 51_200, 2048)
RECIPES = {"LLAMA3_70B": _llama(*LLAMA_70B, 128_256, 8192), "GPT3_175B_MLPERF": GPT3_175B, "GPT3_175B_NEMO": GPT3_175B,
           **dict.fromkeys(("LLAMA3.1_405B", "LLAMA3.1_405B_MLPERF"), _llama(
               126, 16_384, 128, 53_248, 128_256, 8192))}
"""Dense models of NVIDIA's recipes and MLPerf logs whose plans are published."""
SYSTEMS = {"DGX-H100": ("h100-sxm", "dgx-h100"), "DGX-B200": ("b200", "dgx-b200"), "DGX-GB200": ("gb200", "dgx-gb200"),
           "DGX-B300": ("b300", "dgx-b300"), "DGX-GB300": ("gb300", "dgx-gb300")}
MODELS = {"DeepSeekV3": "deepseek-v3", "Qwen3_30B_a3B": "qwen3-30b-a3b", "Qwen3_235B_a22B": "qwen3-235b-a22b",
          "GPT_OSS": "gpt-oss-120b"}
"""Models with experts, by the table's names."""
_WHOLE = "graphs=whole,expert_overlap,fused_experts,dispatcher=hybridep"
_MLA = "recompute=selective,recompute_modules=mla_up_proj,dispatcher=hybridep"
_ACT = "recompute=selective,recompute_modules=layernorm+moe_act"
EXPERTS: dict[tuple[str, str, str, str], tuple[str, str]] = {
    ("DeepSeekV3", "DGX-GB300", "MXFP8", "1 2 8 32"): ("26.06", f"{_WHOLE},fp8_attention"),
    ("DeepSeekV3", "DGX-GB300", "MXFP8", "2 2 8 32"): ("26.04", _MLA),
    ("DeepSeekV3", "DGX-GB200", "MXFP8", "1 4 4 64"): (
        "26.06", f"{_WHOLE},recompute=selective,recompute_modules=mla_up_proj"),
    ("DeepSeekV3", "DGX-GB200", "MXFP8", "1 4 4 64 before"): ("26.02", f"{_MLA},graphs=partial"),
    ("DeepSeekV3", "DGX-B300", "MXFP8", "2 8 1 8"): ("26.04", _MLA),
    ("DeepSeekV3", "DGX-B300", "MXFP8", "1 16 1 8"): ("26.02", _MLA),
    ("DeepSeekV3", "DGX-B200", "MXFP8", "1 16 1 8"): ("26.02", _MLA),
    ("DeepSeekV3", "DGX-B200", "MXFP8", "1 8 2 32"): (
        "26.04", "recompute=selective,recompute_modules=mla_up_proj+mlp,graphs=partial,expert_overlap,"
                 "dispatcher=deepep"),
    ("Qwen3_30B_a3B", "DGX-GB200", "MXFP8", "4 1 1 8"): ("26.06", f"{_WHOLE},fp8_attention"),
    ("Qwen3_30B_a3B", "DGX-GB200", "MXFP8", "4 1 1 8 before"): ("26.02", "graphs=partial,dispatcher=hybridep"),
    ("Qwen3_30B_a3B", "DGX-B200", "MXFP8", "4 1 1 8"): ("26.02", "graphs=partial,dispatcher=hybridep"),
    ("Qwen3_30B_a3B", "DGX-B200", "MXFP8", "1 1 1 8"): ("26.02", ""),
    ("Qwen3_30B_a3B", "DGX-H100", "FP8", "1 1 1 16"): ("26.04", "dispatcher=hybridep"),
    ("Qwen3_30B_a3B", "DGX-H100", "FP8", "1 2 12 8"): ("26.02", "expert_overlap"),
    ("Qwen3_235B_a22B", "DGX-GB200", "MXFP8", "1 8 3 32"): ("26.06", f"{_WHOLE},fp8_attention"),
    ("Qwen3_235B_a22B", "DGX-GB200", "MXFP8", "1 8 3 32 before"): ("26.04", "graphs=partial,dispatcher=hybridep"),
    ("Qwen3_235B_a22B", "DGX-GB200", "MXFP8", "1 8 1 32"): ("26.02", "graphs=partial,dispatcher=hybridep"),
    ("GPT_OSS", "DGX-GB300", "MXFP8", "4 1 1 16"): ("26.06", f"{_WHOLE},fp8_attention"),
    ("GPT_OSS", "DGX-GB200", "MXFP8", "4 1 1 64"): ("26.06", f"{_WHOLE},fp8_attention"),
    ("GPT_OSS", "DGX-B300", "MXFP8", "4 1 1 8"): (
        "26.06", "graphs=partial,expert_overlap,fused_experts,dispatcher=hybridep,fp8_attention"),
    ("GPT_OSS", "DGX-GB300", "BF16", "4 1 1 64"): ("26.02", "graphs=partial"),
    ("GPT_OSS", "DGX-GB200", "BF16", "4 1 1 64"): ("26.02", f"{_ACT},expert_overlap,dispatcher=hybridep"),
    ("GPT_OSS", "DGX-B300", "BF16", "4 1 1 8"): ("26.02", "graphs=partial,dispatcher=hybridep"),
    ("GPT_OSS", "DGX-B300", "BF16", "4 1 1 64"): ("26.02", "graphs=partial"),
    ("GPT_OSS", "DGX-B200", "BF16", "4 1 1 8"): ("26.02", f"{_ACT},dispatcher=hybridep"),
    ("GPT_OSS", "DGX-B200", "BF16", "4 1 1 64"): ("26.02", _ACT),
    ("GPT_OSS", "DGX-H100", "BF16", "1 4 1 8"): ("26.02", _ACT),
}
"""What recipes switch on, by model, system, precision and sizes (micro-batch, pp, chunks, ep): the first release of
these settings, and the settings. All balance the routed tokens by force and reduce gradients in bf16 (Megatron-Bridge,
``scripts/performance/configs`` of 26.04 and ``src/megatron/bridge/perf_recipes``). A row that says "before" is of the
releases before the other one's."""
CONTRADICTED = {("26.06.01", "GPT_OSS"), ("26.02", "Qwen3_30B_a3B", "DGX-H100")}
"""Rows that another release contradicts with the same settings: 4.04 and 4.48 s where 26.06 and 26.08 have 2.48 and
2.86 (GB300, GB200), and 51.3 s where 26.02.01 has 28.9."""
HELD_OUT = ("DGX-B200", "DGX-B300", "DGX-GB300")
FITTED_HOST = ("Qwen3_30B_a3B", "DGX-H100")
"""Model and system of the rows to which ``layer_costs.ROUTED_LAUNCHES`` is fitted."""
FITTED = {("LLAMA3.1_405B", "DGX-GB200", "MXFP8"), ("LLAMA3.1_405B", "DGX-GB200", "NVFP4"),
          ("LLAMA3_70B", "DGX-GB200", "NVFP4")}
"""Model, system and precision of the rows to which ``kernel_models.pricing.COST_ON`` is fitted."""


@dataclass(frozen=True)
class Job:
    """One published row: what it is, which series it is of, what ran where, and seconds of a step."""

    name: str
    series: str
    table: str
    shape: TransformerShape
    plan: ParallelPlan
    device: str
    node: str
    network: str
    seconds: float
    fitted: bool = False
    parts: bool = False

    @property
    def cluster(self) -> CollectiveModel:
        """The nodes of the job."""
        nodes = -(-self.plan.world_size // find_topology(self.node).gpus)
        return CollectiveModel(find_topology(self.node if nodes == 1 else f"{self.node}x{nodes}{self.network}"))


@dataclass(frozen=True)
class Result:
    """A job, seconds predicted, and what binds it."""

    job: Job
    predicted: float
    bound: str
    inside: bool
    parts: str = ""


def mpt_jobs(path: Path) -> list[Job]:
    """LLM-Foundry's tables: FSDP, bf16."""
    jobs = []
    for row in pd.read_parquet(path).to_dict("records"):
        if row["Precision"] == "amp_fp8":
            continue
        layers, hidden, heads = MPT[row["Model"]]
        seq, gpus, kind = int(row["SeqLen (T)"]), int(row["# GPUs"]), row["GPU"]
        shape = TransformerShape(layers, hidden, heads, heads, 4 * hidden, 50_368, seq, bias=False, flash_version=1)
        full = row["Sharding Strategy"] == "FULL_SHARD"
        again = Recomputation.NEEDED if row["Activation Checkpointing"] == "True" else Recomputation.NONE
        plan = ParallelPlan(dp=gpus, microbatch=int(row["MicroBatchSize"]), microbatches=int(row["GradAccum"]),
                            sharding=Sharding.PARAMETERS if full else Sharding.GRADIENTS, recompute=again)
        series = f"{row['Model']} {seq} {plan.microbatch}×{plan.microbatches} {again.value}"
        jobs.append(Job(f"{row['Model']} seq {seq} on {gpus}", series, row["section"], shape, plan, *GPUS[kind],
                        plan.global_batch * seq / float(row["Throughput (T/s)"])))
    return jobs


def dgx_jobs(path: Path) -> list[Job]:
    """NVIDIA's tables of pre-training on H100."""
    jobs = []
    for row in pd.read_parquet(path).to_dict("records"):
        known, narrow = DGX.get((row["ref"], row["file"])), "FP8" in row["workload"]
        if known is None:
            continue
        shape, values = known[0].in_linears("fp8" if narrow else ""), known[1]
        gpus = int(row["gpus"])
        dp = gpus // int(np.prod([int(str(values.get(name, 1))) for name in ("tp", "pp", "cp")]))
        copies = gpus // MAXTEXT_SHARDED if "maxtext" in row["file"] and gpus >= 4 * MAXTEXT_SHARDED else 1
        plan = ParallelPlan(dp=dp, microbatches=int(float(row["gbs"])) // dp // int(str(values.get("microbatch", 1))),
                            replicate=copies, half_gradients=narrow and "llama3.1" in row["file"], **values)
        jobs.append(Job(f"{row['workload'][:34]} on {gpus}", f"{row['ref']} {row['file']}{' fp8' * narrow}",
                        f"H100, pre-training in {'fp8' if narrow else 'bf16'}", shape,
                        plan, "h100-sxm", "dgx-h100", "", float(row["value"])))
    return jobs


def recipe_jobs(path: Path) -> list[Job]:
    """NVIDIA's recipes and MLPerf logs of dense models: tensor parallelism overlapped by userbuffers and gradients in
    bf16, as the recipes have them; embedding and loss count as layers where the layers do not divide by the chunks."""
    jobs: dict[tuple[str, ...], Job] = {}
    with path.open(encoding="utf-8") as stream:
        for row in csv.DictReader(stream):  # newest releases first
            key = tuple(row[name] for name in ("model", "system", "precision", "gpus"))
            if row["model"] not in RECIPES or row["task"] in ("SFT", "LoRA") or key in jobs:
                continue
            shape = RECIPES[row["model"]].in_linears("" if row["precision"] == "BF16" else row["precision"].lower())
            gpus, tp, pp, cp, chunks, microbatch = (int(row[name] or 1) for name in (
                "gpus", "tp", "pp", "cp", "vp", "micro_batch"))
            dp = gpus // (tp * pp * cp)
            uneven = pp > 1 and shape.layers % (pp * chunks) > 0
            plan = ParallelPlan(
                dp=dp, tp=tp, pp=pp, cp=cp, chunks=chunks, microbatch=microbatch,
                schedule=Schedule.INTERLEAVED if chunks > 1 else Schedule.ONE_F_ONE_B,
                microbatches=int(row["global_batch"]) // dp // microbatch, half_gradients=True,
                sharding=Sharding.PARAMETERS if int(row["fsdp"]) > 1 else Sharding.OPTIMIZER,
                sequence_parallel=tp > 1, tensor_overlap=tp > 1, embedding_layer=uneven, loss_layer=uneven)
            spec, node = SYSTEMS[row["system"]]
            jobs[key] = Job(f"{row['model']} {row['precision']} on {gpus} {row['system'][4:]}", "/".join(key[:3]),
                            f"Dense recipes on {'Hopper' if spec == 'h100-sxm' else 'Blackwell'}", shape, plan, spec,
                            node, "", float(row["step_s"]), key[:3] in FITTED)
    return list(jobs.values())


def expert_jobs(path: Path) -> list[Job]:
    """NVIDIA's recipes of models with experts: each row of its newest release with these settings."""
    jobs: dict[tuple[object, ...], Job] = {}
    with path.open(encoding="utf-8") as stream:
        for row in csv.DictReader(stream):  # newest releases first
            sizes = " ".join(row[name] or "1" for name in ("micro_batch", "pp", "vp", "ep"))
            about = row["model"], row["system"], row["precision"]
            release, settings = EXPERTS.get((*about, sizes), ("", ""))
            if release > row["release"]:
                sizes += " before"
                release, settings = EXPERTS.get((*about, sizes), ("", ""))
            key = (*about, sizes, row["global_batch"])
            if not release or key in jobs or row["task"] in ("SFT", "LoRA") or CONTRADICTED & {
                    (row["release"], row["model"]), (row["release"], *about[:2])}:
                continue
            spec, node = SYSTEMS[row["system"]]
            shape, plan = _experts(row, settings)
            held = row["model"] == "Qwen3_235B_a22B" or row["system"] in HELD_OUT
            jobs[key] = Job(f"{' '.join(about)} on {row['gpus']}, {row['release']}"[:46], "/".join((*about, sizes)),
                            f"Recipes with experts, {'held out' if held else 'looked at'}", shape, plan, spec, node, "",
                            float(row["step_s"]), about[:2] == FITTED_HOST, parts=True)
    return list(jobs.values())


def _experts(row: dict[str, str], settings: str) -> tuple[TransformerShape, ParallelPlan]:
    """Return the decoder and the plan of a row. Prediction modules and the loss count as layers, as they do in the
    recipes' layouts."""
    _, shape, _, _ = read_decoder(MODELS[row["model"]], ["seq=4096", "imbalance=1"])
    shape = shape.in_linears("" if row["precision"] == "BF16" else row["precision"].lower())
    gpus, pp, chunks, ep, microbatch = (int(row[name] or 1) for name in ("gpus", "pp", "vp", "ep", "micro_batch"))
    dp = gpus // pp
    passes = int(row["global_batch"]) // dp // microbatch
    text = f"dp={dp},sharding=1,ep={ep},microbatch={microbatch},microbatches={passes},half_gradients"
    if pp > 1:
        uneven = shape.layers % (pp * chunks) > 0
        text += f",pp={pp}" + ",loss_layer" * uneven + ",embedding_layer" * (uneven and not shape.predictions)
        text += f",chunks={chunks},schedule=interleaved" * (chunks > 1)
    text += ",fp8_parameters" * bool(shape.linears) + f",{settings}" * bool(settings)
    return shape, ParallelPlan.parse(text)


def predict(jobs: Sequence[Job]) -> dict[str, list[Result]]:
    """Every job's step, by table."""
    pieces = {name: LayerCosts(device(name)) for name in {job.device for job in jobs}}
    tables: dict[str, list[Result]] = defaultdict(list)
    for job in jobs:
        found = estimate(costs_of_plan(job.plan, job.shape, pieces[job.device], job.cluster))
        tables[job.table].append(Result(job, found.time_us / 1e6, found.bound,
                                        found.low_us <= 1e6 * job.seconds <= found.high_us,
                                        _parts(job, found, pieces[job.device]) if job.parts else ""))
    return tables


LEAST = 0.02
"""A choice: below this difference of two measured steps, runs and releases of equal settings differ by as much. Steps
of Llama 3.1 405B on GB200 in fp8 and MXFP8 differ by 0.9 to 3.1% from one release of the recipe to the next."""


@dataclass(frozen=True)
class Measured:
    """A row of a pair: its settings by name, sequences of its step and GPUs, and its time, measured and predicted."""

    settings: dict[str, object]
    sequences: int
    gpus: int
    measured: float
    predicted: float

    @staticmethod
    def of(shape: TransformerShape, plan: ParallelPlan, where: object, measured: float, predicted: float) -> Measured:
        """Return the row of a plan; replicas and micro-batches follow from GPUs and sequences."""
        own = {field.name: getattr(plan, field.name) for field in fields(plan)
               if field.name not in ("dp", "microbatches", "lone_ddp")}
        sizes = {"model": replace(shape, linears="", seq=1, stack=()), "linears": shape.linears, "tokens": shape.seq}
        return Measured({**own, **sizes, "system": where, "gpus": plan.world_size}, plan.global_batch, plan.world_size,
                        measured, predicted)


def signs(rows: Sequence[Measured]) -> pd.DataFrame:
    """Return the pairs that differ in one setting: which, and by what share each takes longer, measured and predicted.

    Sequences are those of a step or of a GPU in both rows; where they are all that differs they are the setting. Times
    are GPU-seconds of a sequence, so that what has more GPUs or sequences is not right for that alone.
    """
    found = []
    for i, one in enumerate(rows):
        for other in rows[:i]:
            differ = [name for name, value in one.settings.items() if value != other.settings[name]]
            same = one.sequences == other.sequences or one.sequences * other.gpus == other.sequences * one.gpus
            if len(differ) != (1 if same else 0) or (not differ and same):
                continue
            scale = one.gpus * other.sequences / (other.gpus * one.sequences)
            found.append((differ[0] if differ else "sequences", scale * one.measured / other.measured - 1,
                          scale * one.predicted / other.predicted - 1))
    return pd.DataFrame(found, columns=["setting", "measured", "predicted"])


def show_signs(title: str, pairs: pd.DataFrame) -> None:
    """Print how often the sign is right: of all pairs, of those that differ by more than noise, and by setting."""
    def share(of: pd.DataFrame) -> str:
        right = np.sign(of.measured) == np.sign(of.predicted)
        return f"{right.sum():,} of {len(of):,} ({right.mean():.1%})" if len(of) else "none"

    clear = pairs[pairs.measured.abs() >= LEAST]
    print(f"{title}: {share(clear)} right where measured steps differ by {LEAST:.0%} or more; of all pairs "
          f"{share(pairs)}")
    for setting, rows in sorted(clear.groupby("setting"), key=lambda each: -len(each[1])):
        print(f"  {setting:20}{share(rows):>28}")


def _parts(job: Job, found: Estimate, pieces: LayerCosts) -> str:
    """Say of what the step is, in seconds, and whether the plan fits."""
    values = {"products": found.products, "others": found.others, "host": found.host, "exposed": found.layers,
              "hidden": found.hidden, "bubble": found.pipeline}
    memory, device_bytes = fullest_of(job.plan, job.shape, pieces), 1e9 * pieces.device.memory_gb
    return ", ".join(f"{name} {us / 1e6:.1f}" for name, us in values.items()) + (
        f"; {memory.account.total / 1e9:.0f} GB, {fit_of(memory, device_bytes).value}")


def show(title: str, rows: list[Result]) -> None:
    """Print a table: every row, its errors, its orders and slopes."""
    print(f"\n{title}: {len(rows)} rows")
    for row in rows:
        print(f"  {row.job.name:46}{row.job.seconds:>10.3f}{row.predicted:>10.3f} s"
              f"{row.predicted / row.job.seconds - 1:>+8.1%}  {row.parts or row.bound}{', fitted' * row.job.fitted}")
    rows = [row for row in rows if not row.job.fitted]
    measured, predicted = (np.array([row.job.seconds for row in rows]),
                           np.array([row.predicted for row in rows]))
    error = 100 * (predicted / measured - 1)
    size = np.abs(error)
    rank = spearmanr(measured, predicted).statistic
    print(f"  MAPE {size.mean():.1f}%, median {np.median(size):.1f}%, bias {error.mean():+.1f}%, p90 "
          f"{np.quantile(size, 0.9):.1f}%, largest {size.max():.1f}%; {sum(row.inside for row in rows)} of {len(rows)} "
          f"inside; Spearman {rank:.3f} (asked {ASKED})")
    for series in dict.fromkeys(row.job.series for row in rows):
        mine = sorted((row for row in rows if row.job.series == series), key=lambda row: row.job.plan.world_size)
        least, most = (mine[end].job.plan.world_size for end in (0, -1))
        if most > least:
            slopes = mine[-1].job.seconds / mine[0].job.seconds, mine[-1].predicted / mine[0].predicted
            rank = spearmanr([row.job.seconds for row in mine], [row.predicted for row in mine]).statistic
            print(f"  {series}: {least} → {most} GPUs × {slopes[0]:.3f} measured, × {slopes[1]:.3f} predicted"
                  + (f"; Spearman {rank:.2f} of {len(mine)}" if len(mine) > 2 else ""))


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", type=Path, default=DATA)
    parser.add_argument("--rows", choices=["mpt", "dgx", "recipes", "experts", "all"], default="all")
    parser.add_argument("--pairs", action="store_true")
    options = parser.parse_args()
    folder = options.data / "end_to_end"
    tables = {"dgx": (dgx_jobs, "dgxc_step_times.parquet"), "recipes": (recipe_jobs, "training_hopper_blackwell.csv"),
              "experts": (expert_jobs, "training_hopper_blackwell.csv"),
              "mpt": (mpt_jobs, "mosaic_mpt_fsdp.parquet")}
    jobs = [job for name, (read, file) in tables.items() if options.rows in (name, "all") for job in read(
        folder / file)]
    every: list[Measured] = []
    for title, rows in predict(jobs).items():
        if not options.pairs:
            show(title, rows)
            continue
        own = [Measured.of(row.job.shape, row.job.plan, (row.job.device, row.job.node, row.job.network),
                           row.job.seconds, row.predicted) for row in rows]
        show_signs(title, signs(own))
        every += own
    if every:
        show_signs("all tables, with pairs of two", signs(every))


if __name__ == "__main__":
    main()
