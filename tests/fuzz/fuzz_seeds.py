"""Small, sound inputs of every kind that foretrace reads: what the fuzzer damages.

They are made by the code under test where it writes the kind (so that they are always of today's format), and by hand
where others write it. Everything is deterministic and small: a case should cost milliseconds.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import pickle
import shutil
import sys
from pathlib import Path

import pandas as pd

HERE = Path(__file__).resolve().parent
for _folder in ("graph_predictor", "kernel_models", "tracer"):
    sys.path.append(str(HERE.parent / _folder))

import check_support  # noqa: E402
import other_profilers  # noqa: E402
from et_support import node, write_trace  # noqa: E402
from learned_support import QUICK, gemm_samples, gemm_table  # noqa: E402
from micro import Micro  # noqa: E402

NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def training_step(rank: int | None = None, world_size: int = 1, steps: int = 3) -> Micro:
    """Steps of two products, a backward thread, copies, a pageable read, a second stream with an event, a collective.

    Everything that makes a dependency in the simulator is there once.
    """
    trace = Micro(rank=rank, world_size=world_size)
    trace.metadata["deviceProperties"] = [{"id": 0, "name": "NVIDIA A100-SXM4-80GB", "totalGlobalMem": 85 * 10**9,
                                           "numSms": 108, "computeMajor": 8, "computeMinor": 0}]
    trace.metadata.update({"record_shapes": 1, "with_stack": 0, "traceName": "trace.json",
                           "baseTimeNanoseconds": 1711964646000000000})
    trace.calibrate()
    sizes = {"Input Dims": [[32, 64], [64, 128], []], "Input type": ["float", "float", "Scalar"],
             "Input Strides": [[64, 1], [128, 1], []], "Concrete Inputs": ["", "", "1"]}
    group = {"Collective name": "allreduce", "Process Group Name": "dp", "Process Group Ranks": "[0, 1]",
             "Group size": 2, "In msg nelems": 4096, "Out msg nelems": 4096, "dtype": "Float"}
    for step in range(steps):
        at = 1000 + 500 * step
        trace.step(at, at + 500, step + 1)
        trace.op("aten::linear", at + 10, at + 40, **sizes, **{"Ev Idx": 10 * step + 1, "Sequence number": step})
        trace.op("aten::addmm", at + 12, at + 38, **sizes, **{"Ev Idx": 10 * step + 2})
        trace.launch(at + 20, 5, (7, at + 30, 60), grid=[2, 3, 1], block=[128, 1, 1])
        trace.op("aten::copy_", at + 42, at + 60, **{"Input Dims": [[32, 64], [32, 64]],
                                                     "Input type": ["float", "float"], "Ev Idx": 10 * step + 3})
        trace.copy(at + 44, 4, (7, at + 91, 10), "HtoD (Pinned -> Device)", 8192)
        trace.call("cudaEventRecord", at + 52, 2)
        trace.call("cudaStreamWaitEvent", at + 56, 2)
        trace.op("autograd::engine::evaluate_function: AddmmBackward0", at + 100, at + 150, 2,
                 **{"Ev Idx": 10 * step + 4, "Sequence number": step, "Fwd thread id": 1})
        trace.launch(at + 110, 5, (7, at + 120, 80), thread=2, name="gemm_backward")
        if rank is not None:
            trace.launch(at + 130, 5, (20, at + 205, 40), thread=2, name=NCCL, **group)
        trace.op("aten::_local_scalar_dense", at + 160, at + 300, **{"Ev Idx": 10 * step + 5})
        trace.copy(at + 165, 100, (7, at + 210, 5), "DtoH (Device -> Pageable)", 4)
        trace.call("cudaStreamSynchronize", at + 270, 20)
        trace.op("Optimizer.step#Adam.step", at + 310, at + 390, **{"Ev Idx": 10 * step + 6})
        trace.launch(at + 320, 5, (7, at + 330, 30), name="multi_tensor_apply_kernel")
        trace.call("cudaGraphLaunch", at + 400, 10)
        trace.call("cudaDeviceSynchronize", at + 430, 30)
    return trace


def cpu_step(steps: int = 3) -> Micro:
    """Steps on a host alone."""
    trace = Micro()
    for step in range(steps):
        at = 100 + 400 * step
        trace.step(at, at + 400, step)
        for i, name in enumerate(("aten::linear", "aten::relu", "aten::_softmax", "aten::embedding")):
            trace.op(name, at + 10 + 90 * i, at + 80 + 90 * i,
                     **{"Input Dims": [[8, 16], [16, 16]], "Input type": ["float", "float"], "Ev Idx": 4 * step + i})
    return trace


def execution_trace(path: Path) -> Path:
    """An execution trace of a few operations, one of them a collective."""
    tensor = [1, 1, 0, 512, 4, "cpu"]
    arguments = {"values": [tensor, tensor], "shapes": [[32, 64], [64, 128]], "types": ["Tensor(float)"] * 2,
                 "strides": [[64, 1], [128, 1]]}
    return write_trace(path, [
        node(3, "ProfilerStep#1", parent=2, rf_id=1),
        node(4, "aten::linear", parent=3, rf_id=2, inputs=arguments, outputs=arguments, op_schema="aten::linear()"),
        node(5, "record_param_comms", parent=3, rf_id=3, inputs={
            "values": [tensor, 0, ["0", "default_pg"], 0, "allreduce", [], [], 0, 1, 2], "shapes": [], "types": [],
            "strides": []}),
        node(6, "aten::relu", parent=3, rf_id=4, inputs=arguments),
    ])


NCCL_LOG = """# Collective test starting: all_reduce_perf
# nThread 1 nGpus 4 minBytes 8 maxBytes 134217728 step: 2(factor) warmup iters: 5 iters: 20
#  Rank  0 Group  0 Pid  4711 on  node1 device  0 [0x07] NVIDIA H100
#  Rank  1 Group  0 Pid  4712 on  node1 device  1 [0x07] NVIDIA H100
#  Rank  2 Group  0 Pid  4713 on  node1 device  2 [0x07] NVIDIA H100
#  Rank  3 Group  0 Pid  4714 on  node1 device  3 [0x07] NVIDIA H100
#
#                                          out-of-place              in-place
#   size   count   type redop root   time  algbw  busbw #wrong   time  algbw  busbw #wrong
#    (B) (elements)                   (us) (GB/s) (GB/s)          (us) (GB/s) (GB/s)
       0       0  float   sum   -1   5.05   0.00   0.00      0   5.01   0.00   0.00      0
    1024     256  float   sum   -1  10.00   0.10   0.14      0   9.80   0.10   0.14      0
   65536   16384  float   sum   -1  12.00   5.46   8.19      0  11.80   5.55   8.32      0
 1048576  262144  float   sum   -1  25.41  41.27  61.90      0  25.17  41.66  62.49      0
 8388608 2097152  float   sum   -1  80.41 104.32 156.48      0  80.17 104.63 156.95      0
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 13.7885
"""
OSU_LOG = """# OSU MPI Allreduce Latency Test v7.3
# Datatype: MPI_FLOAT.
# Size       Avg Latency(us)
1024                   21.95
4096                   25.97
1048576               260.00
"""
UCC_LOG = """Collective:             Alltoall
Memory type:            cuda
Datatype:               float32

       Count        Size                Time, us                           Bandwidth, GB/s
                                 avg         min         max         avg         max         min
           1           4        17.97       17.29       18.99        0.00        0.00        0.00
        1024        4096        18.50       17.90       19.40        0.20        0.20        0.20
"""
PARAM_LOG = """[Rank   0] allSizes: [1024, 4194304] local_rank: 0 element_size: 4
\tCOMMS-RES   size (B) nElementsPerRank Latency(us):p50  p75  p95  Min  Max AlgBW(GB/s) BusBW(GB/s)
\tCOMMS-RES-all_reduce     1024      256  24.1  24.5  25.0  23.0  26.0   0.042   0.074
\tCOMMS-RES-all_reduce  4194304  1048576  84.0  85.0  86.0  83.0  87.0  49.932  87.381
"""
PLAN = """name = "mine"
description = "for a test"
device = "cpu"
threads = 1

[[kernel]]
family = "gemm"
product = { m = [16, 32], n = [16], k = [16, 48], dtype = ["fp32"] }

[[workload]]
name = "llama"
"""
JOB = """data_scheme = "ddp"
dp = 2
tp = 1
parameters = 4096
"""


SCRIPT = """import torch


def step(batch=2):
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def one():
        optimizer.zero_grad()
        loss = model(torch.randn(batch, 4)).sum()
        loss.backward()
        optimizer.step()
    return one


if __name__ == "__main__":
    one = step()
    for _ in range(20):
        one()
"""


def build_seeds(folder: Path, programs: bool = False) -> Path:
    """Write all seeds into a directory; kinds of one file are named ``KIND*``, of several are directories.

    With ``programs`` also those that PyTorch makes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if programs:
        _programs(folder)
    for make in (_traces, _profiles, _collectives, _captures, _campaign, _measured, _datasets, _tomls, _sweep,
                 _survey, _recorded, _notes, _foreign):
        make(folder)
    return folder


def _traces(folder: Path) -> None:
    training_step().write(folder / "kineto.json")
    cpu_step().write(folder / "kineto_cpu.json")
    (folder / "kineto.json.gz").write_bytes(gzip.compress((folder / "kineto.json").read_bytes(), mtime=0))
    check_support.step_trace().write(folder / "kineto_linear.json")
    old = Micro(era="list-2020").calibrate().step(1000, 1300)
    old.op("aten::mm", 1010, 1040)
    old.launch(1020, 5, (7, 1030, 100))
    old.call("cudaDeviceSynchronize", 1100, 60)
    old.write(folder / "kineto_2020.json")
    job = folder / "job"
    job.mkdir(exist_ok=True)
    for rank in range(2):
        training_step(rank, 2).write(job / f"rank{rank}.json")
    execution_trace(folder / "et.json")
    from tracer.job import read_job, save_job
    from tracer.store import save_graph

    save_graph(read_job([folder / "kineto.json"]).graphs[0], folder / "graph.foretrace")
    save_job(read_job([job / "rank0.json", job / "rank1.json"]), folder / "job.foretrace")
    # Longer than a manifest's lists: its tables are Parquet.
    training_step(steps=40).write(folder / "long.json")
    save_graph(read_job([folder / "long.json"]).graphs[0], folder / "graph_long.foretrace")
    (folder / "long.json").unlink()


def _profiles(folder: Path) -> None:
    from kernel_models.device import device
    from kernel_models.heuristics.roofline import RooflineModel
    from kernel_models.learned.boosted import Intervals
    from kernel_models.learned.fit import Problem
    from kernel_models.op_call import Family
    from kernel_models.profile import DeviceProfile, ProfileEntry, save_profile

    spec = device("h200-sxm")
    problem = Problem.of(gemm_samples(60), spec)
    quick = QUICK.scaled(0.05)
    predicted, done, _ = problem.out_of_fold(quick, folds=2)
    model = problem.model(quick, Intervals.of(predicted[done], problem.measured_us[done]))
    save_profile(DeviceProfile(spec, [
        ProfileEntry("boosted", model, "lib-1.0", 60, {"held_out": {"n": 3, "mape": 0.02}}),
        ProfileEntry("roofline", RooflineModel(Family.NORM, spec), "lib-1.0", 20),
    ], {"date": "2026-01-02", "data": ["law"]}), folder / "device.profile")


def _collectives(folder: Path) -> None:
    (folder / "nccl.log").write_text(NCCL_LOG)
    (folder / "param.log").write_text(PARAM_LOG)
    (folder / "osu.log").write_text(OSU_LOG)
    (folder / "ucc.log").write_text(UCC_LOG)
    frame = pd.DataFrame({
        "collective": "all_reduce", "dtype": "float16", "ranks": [2] * 6 + [8] * 6, "nodes": 1,
        "payload_bytes": [2**i for i in range(10, 28, 3)] * 2, "backend": "nccl",
        "latency_us": [5.0 + 2.0**i / 1e5 for i in range(10, 28, 3)] * 2})
    frame.to_csv(folder / "collectives.csv", index=False)
    frame.to_csv(folder / "collectives.tsv", index=False, sep="\t")
    frame.to_json(folder / "collectives.jsonl", orient="records", lines=True)
    frame.to_parquet(folder / "collectives.parquet")
    from kernel_models.collectives import CommProfile, find_topology
    from kernel_models.collectives.logs import read_log
    from kernel_models.collectives.measurements import Hints

    one = CommProfile.fit(read_log(str(folder / "nccl.log")), find_topology("dgx-h100"), ["a log"])
    one.save(folder / "comm.json")
    CommProfile(one.topology, {"nccl": one.backends["nccl"], "mpi": CommProfile.fit(read_log(
        str(folder / "osu.log"), Hints(8)), one.topology).backends["nccl"]}).save(folder / "choices.json")


def _captures(folder: Path) -> None:
    root = folder / "checked"
    for name, noise in (("mlp", 0), ("other", 1)):
        check_support.write_capture(root / name, check_support.step_trace(1 + noise),
                                    check_support.samples(550, seed=noise),
                                    workload={"name": "mlp", "settings": {"batch": 4}} if noise else {})
    execution_trace(folder / "part_et.json")
    (root / "mlp" / "rank0" / "et.json.gz").write_bytes(
        gzip.compress((folder / "part_et.json").read_bytes(), mtime=0))
    (folder / "part_et.json").unlink()
    (root / "mlp" / "rank0" / "collectives.json").write_text(json.dumps({"rows": [
        {"op": "c10d::allreduce_", "kind": "all_reduce", "group": "0", "ranks": [0, 1], "dtype": "float",
         "elements_in": 64, "elements_out": 64, "async": True}]}))
    from foretrace.commands import app

    app(["check", str(root), "--update-baseline", "--reason", "seeds", "--json"],
        standalone_mode=False)


def _campaign(folder: Path) -> None:
    from tracer.campaign.items import Item
    from tracer.campaign.results import Results, ended

    root = folder / "campaign"
    shutil.rmtree(root, ignore_errors=True)
    results = Results(root)
    results.open("mine", "for a test", resume=False, rehearsal=True)
    try:
        results.begin_session({"hardware": {"device": "CPU", "cpu": "a CPU"}, "software": {"torch": "2.13.0"}})
        items = [Item(id=f"id{i}", kind="kernel", name="gemm", settings={"m": 16 * i, "n": 16, "k": 16}, counts={},
                      split="fit", priority=i, seconds=1.0) for i in (1, 2)]
        results.save([ended(item, "ok", content="kernels", file="kernels/gemm.parquet", median_ns=5000)
                      for item in items])
        (root / "kernels").mkdir()
        pd.DataFrame({"session": 0, "m": [16, 32], "n": 16, "k": 16, "batch": 1, "dtype": "fp32", "layout": "nt",
                      "p50_us": [5.0, 6.0], "p25_us": [4.9, 5.9], "p75_us": [5.1, 6.1], "min_us": [4.0, 5.0],
                      "device": "CPU"}).to_parquet(root / "kernels" / "gemm.parquet")
    finally:
        results.close()


def _measured(folder: Path) -> None:
    """Write a campaign's tables of micro-benchmarks, as ``tracer.campaign.tables`` describes them."""
    kernels = folder / "measured" / "kernels"
    kernels.mkdir(parents=True, exist_ok=True)
    (folder / "measured" / "campaign.json").write_text(json.dumps({"sessions": [
        {"hardware": {"device": "NVIDIA H200"}, "software": {"torch": "2.9.0"}}]}))
    families = {
        "gemm": {"m": 64, "n": 128, "k": 256, "batch": 1, "op": "mm", "layout": "nt"},
        "attention": {"batch": 2, "heads": 8, "kv_heads": 4, "seq": 128, "kv_seq": 0, "head_dim": 64, "op": "forward",
                      "backend": "flash", "causal": True},
        "convolution": {"batch": 2, "channels": 8, "out_channels": 16, "size": 14, "kernel": 3, "stride": 2,
                        "groups": 1, "op": "forward", "channels_last": False},
        "embedding": {"rows": 1000, "width": 64, "lookups": 128, "pooling": 4, "op": "forward", "law": "uniform"},
        "foreach": {"elements": 4096, "tensors": 8, "op": "add_"},
        "copy": {"bytes": 4096, "direction": "h2d", "memory": "pinned"}}
    for family, settings in families.items():
        pd.DataFrame([{"id": f"{family}-{i}", "session": 0, "split": "held-out" if i == 2 else "fit",
                       "variant": variant, "runs": 20, **dict.fromkeys(("min_us", "p25_us", "p75_us", "p90_us"), 11.5),
                       "p10_us": 11.0 + i, "p50_us": 12.0 + i, "kernel_us": 11.0,
                       "kernel_count": 1.0,
                       "event_overhead_us": 2.0, "dtype": "bf16", **settings}
                      for i in range(4) for variant in ("warm", "warm 2", "cold")]).to_parquet(
                          kernels / f"{family}.parquet")


def _datasets(folder: Path) -> None:
    table = gemm_table(30)
    table.to_csv(folder / "table.csv", index=False)
    table.to_parquet(folder / "table.parquet")
    time = {"latency_us": 10.0}
    forms: dict[str, dict[str, object]] = {
        "neusight": {"OPName": "bmm", "Device": "Tesla T4", "B": 3, "H": 4, "M": 64, "N": 32, "K": 16,
                     "split": "train"},
        "vidur": {"n_head": 64, "n_kv_head": 8, "n_embd": 8192, "n_expanded_embd": 28672, "vocab_size": 32768,
                  "use_gated_mlp": True, "num_tokens": 96, "num_tensor_parallel_workers": 4, "gpu": "h100",
                  "model": "70b", "op": "mlp_up_proj"},
        "attention": {"gpu": "L40S", "software": "s", "kernel_source": "fa", "batch_size": 2, "seq_len": 64,
                      "num_heads": 8, "num_kv_heads": 2, "head_dim": 128, "window_size": 0.0},
        "operators": {"name": "aten::mm", "Input Dims": "((64, 128), (128, 256))", "Concrete Inputs": "('', '')",
                      "Input type": "('c10::BFloat16', 'c10::BFloat16')", "Input Strides": "((128, 1), (1, 128))",
                      "Kernel Time (µs)_median": "12.5", "kernel_details_summary": "[]"},
        "generic": {"family": "gemm", "device": "h100-sxm", "batch": 1, "m": 64, "n": 32, "k": 16, "group": "a",
                    "split": "fit"}}
    for name, row in forms.items():
        frame = pd.DataFrame([{**time, **row}] * 6)
        frame.to_parquet(folder / f"{name}.parquet")
        frame.to_csv(folder / f"{name}.csv", index=False)


def _tomls(folder: Path) -> None:
    (folder / "plan.toml").write_text(PLAN)
    (folder / "job.toml").write_text(JOB)
    (folder / "device.toml").write_text(_shipped("tracer/devices/h200-sxm.toml").replace('"h200-sxm"', '"mine"', 1))
    networks = _shipped("kernel_models/topologies/networks.toml")
    network = networks.partition("[network.")[2].partition("\n\n")[0].partition("\n")[2]
    node = _shipped("kernel_models/topologies/dgx-h200.toml").replace('"dgx-h200"', '"node"', 1)
    (folder / "node.toml").write_text(f"{node}\n[networks.mine]\n{network}\n")


def _shipped(name: str) -> str:
    import tracer

    return (Path(tracer.__file__).parents[1] / name).read_text(encoding="utf-8")


def _sweep(folder: Path) -> None:
    from foretrace.commands import app

    out = folder / "sweep"
    out.mkdir(exist_ok=True)
    shutil.copy(folder / "kineto_linear.json", out / "trace.json")
    app(["sweep", str(out / "trace.json"), "--clock", "1,2", "--jobs", "1", "-o", str(out / "points.csv"), "--json"],
        standalone_mode=False)


def _survey(folder: Path) -> None:
    """Write a survey of two jobs in two parts, as one that was killed leaves it, and beside it what it is of."""
    from foretrace.commands import app

    root = folder / "survey"
    (root / "runs").mkdir(parents=True, exist_ok=True)
    for name in ("kineto_linear.json", "kineto.json"):
        shutil.copy(folder / name, root / "runs" / name)
        app(["survey", "run", str(root / "runs" / name), "--workers", "1", "-o", str(root / "table"), "--tag",
             "team=ads", "--json"], standalone_mode=False)


TOPO = "\n".join(["\t" + "\t".join([*(f"GPU{i}" for i in range(4)), "NIC0", "NIC1", "CPU Affinity"]), *(
    "\t".join([f"GPU{i}", *(" X " if i == j else "NV4" for j in range(4)), "PIX", "SYS", "0-15"]) for i in range(4)), *(
        "\t".join([f"NIC{i}", *["PIX"] * 4, *(" X " if i == j else "SYS" for j in range(2))]) for i in range(2)), "",
    "Legend:", "  X    = Self"]) + "\n"
TOPO_XML = '<system version="1"><cpu numaid="0" arch="x86_64">' + "".join(
    f'<pci busid="0000:1{i}:00.0" class="0x030200" link_speed="32.0 GT/s PCIe" link_width="16"><gpu dev="{i}" sm="90">'
    '<nvlink target="0000:c0:00.0" count="18" tclass="0x068000"/></gpu></pci><nic>'
    f'<net name="mlx5_{i}" dev="{i}" speed="400000" port="1"/></nic>' for i in range(4)) + "</cpu></system>"
TABLES = "name,rows,columns,bag,dtype,pooling\na,1000,64,4,fp32,sum\nb,50000,32,1,fp16,mean\nc,7,128,20,fp32,sum\n"


def _foreign(folder: Path) -> None:
    """Write what other programs write: recordings of other profilers, a snapshot, maps of a node, tables."""
    from tracer.kineto import read_kineto

    graph = read_kineto(folder / "kineto.json")
    (folder / "nsys.sqlite").unlink(missing_ok=True)
    other_profilers.write_nsys(graph, folder / "nsys.sqlite")
    other_profilers.write_rocprof(graph, folder / "rocprof.json")
    (folder / "rocprof.json.gz").write_bytes(gzip.compress((folder / "rocprof.json").read_bytes(), mtime=0))
    frames = [{"filename": f"/code/{name}.py", "line": 12, "name": name} for name in ("forward", "main")]
    inner = [{"filename": "/x/site-packages/torch/optim/adam.py", "line": 5, "name": "step"}]
    events = [{"action": action, "addr": 512 * (i // 2), "size": 512, "stream": 0, "time_us": i, "pool_id": (0, 0),
               "frames": [*(inner if i % 5 == 0 else []), *frames] if i % 3 else []}
              for i, action in enumerate(["alloc", "free_requested", "free_completed", "alloc"] * 5 + ["oom"])]
    block = {"size": 512, "address": 4096, "state": "active_allocated", "frames": frames}
    (folder / "snapshot.pickle").write_bytes(pickle.dumps({
        "segments": [{"device": 0, "total_size": 2 << 20, "allocated_size": 5816, "blocks": [block] * 2}],
        "device_traces": [events, []], "allocator_settings": {"x": None, "y": 0.5}}, 4))
    (folder / "topo.txt").write_text(TOPO)
    (folder / "topo.xml").write_text(TOPO_XML)
    (folder / "embeddings.csv").write_text(TABLES)
    (folder / "indices.csv").write_text("table,sample,index\n" + "".join(
        f"{table},{sample},{7 * sample % 5}\n" for table in "ab" for sample in range(40)))
    pd.read_csv(folder / "indices.csv").to_parquet(folder / "indices.parquet")
    (folder / "inspector.log").write_text("".join(json.dumps({
        "header": {"id": "0x7f", "rank": rank, "n_ranks": 8, "nnodes": 1},
        "metadata": {"inspector_output_format_version": "v4.0"},
        "coll_perf": {"coll": "AllReduce", "coll_sn": i, "coll_msg_size_bytes": 1 << (10 + i), "coll_exec_time_us":
                      20 + (1 << (10 + i)) / 200e3 + rank, "coll_algobw_gbs": 1.0}}) + "\n"
        for i in range(12) for rank in range(2)))
    rows = list(csv.DictReader(io.StringIO(TABLES)))
    (folder / "embeddings.json").write_text(json.dumps({"tables": [
        {key: int(value) if value.isdigit() else value for key, value in row.items()} for row in rows]}))
    modules = training_step()
    place = next(event["pid"] for event in modules.events if event.get("cat") == "cpu_op")
    for step in range(3):
        at = 1000 + 500 * step
        for name, begin, end in (("Net_0", 5, 70), ("Linear_0", 8, 45), ("Linear_1", 46, 65)):
            modules.events.append(modules._row("python_function", f"nn.Module: {name}", at + begin, end - begin, place,
                                               1, {}))
    modules.write(folder / "kineto_modules.json")


def _recorded(folder: Path) -> None:
    """Copy one of the project's recordings: a capture of a real program."""
    shutil.copytree(HERE.parents[1] / "traces" / "host" / "lstm" / "round2", folder / "recorded", dirs_exist_ok=True)


def _notes(folder: Path) -> None:
    """Write what a user may keep in a directory beside a trace."""
    root = folder / "notes"
    root.mkdir(exist_ok=True)
    shutil.copy(folder / "kineto_linear.json", root / "trace.json")
    (root / "notes.txt").write_text("what was found")
    (root / "notes.json").write_text('{"what": "was found"}')
    (root / "table.csv").write_text("what,was\n1,2\n")
    (root / "empty").write_text("")
    for name in ("work.lock", "x.work"):  # names that foretrace has for its own
        (root / name).mkdir(exist_ok=True)
        (root / name / "kept.txt").write_text("mine")
    (root / "table.csv.journal").write_text("mine")
    (root / "notes.json.tmp").write_text("mine")


def _programs(folder: Path) -> None:
    """Steps traced by shapes, and a capture of a decoder: what is traced again, or planned."""
    from foretrace.commands import app
    from tracer import workloads

    for name, workload, more in (("shapes_llama.foretrace", "llama", []), ("shapes_dlrm.foretrace", "dlrm", []),
                                 ("shapes_ddp.foretrace", "gpt2", ["--world-size", "4", "--parallel", "ddp=4"])):
        app(["trace", "--workload", workload, "-o", str(folder / name), "--json", *more], standalone_mode=False)
    (folder / "script.py").write_text(SCRIPT)
    settings = workloads.as_plain(workloads.configure("llama"))
    check_support.write_capture(folder / "decoder", check_support.step_trace(1), check_support.samples(550, seed=3),
                                workload={"name": "llama", "settings": settings})
