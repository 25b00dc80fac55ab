"""A case: damaged input files and a command that reads them, with odd options now and then.

``draw_case`` takes every choice from one ``random.Random``; hypothesis gives it one whose choices it makes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from random import Random

import fuzz_mutators as mutators
from fuzz_mutators import Mutator

INPUT = "IN"
"""In a case's arguments, where the damaged file or directory stands."""


@dataclass(frozen=True)
class Case:
    """``files`` are the damaged input, by path below the case's directory; ``arguments`` those of ``foretrace``.

    In the arguments ``IN/…`` is below the case's input, ``OUT/…`` below an empty directory, ``SEED/…`` a sound file.
    """

    kind: str
    files: dict[str, bytes]
    arguments: list[str]
    odd: dict[str, str] = field(default_factory=dict)
    """By path what is no regular file: "fifo", "directory", or what a link leads to."""

    def write(self, folder: Path, seeds: Path) -> list[str]:
        """Write the input below ``folder``; returns the command's arguments."""
        for name, content in self.files.items():
            path = folder / "in" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        for name, what in self.odd.items():
            path = folder / "in" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir():
                shutil.rmtree(path)
            path.unlink(missing_ok=True)
            if what == "fifo":
                os.mkfifo(path)
            elif what == "directory":
                path.mkdir()
            else:
                path.symlink_to(what)
        (folder / "out").mkdir(parents=True, exist_ok=True)
        places = {"IN": folder / "in", "OUT": folder / "out", "SEED": seeds}
        return [re.sub(r"(?<![A-Za-z])(IN|OUT|SEED)/", lambda m: f"{places[m[1]]}/", argument)
                for argument in self.arguments]


@dataclass(frozen=True)
class Kind:
    """Files of a kind: seeds, what damages them, and the commands that read them (``IN`` stands for the input)."""

    seeds: Sequence[str]
    damage: dict[str, Sequence[Mutator]]
    """By ending of the file's name; the longest that fits."""
    commands: Sequence[str]


M = mutators
_TRACE = (*[M.trace_events] * 6, *[M.json_tree] * 2, M.plain_bytes, M.json_text)
_GRAPH = (*[M.graph_file] * 8, M.zip_odd)
_STEP = ("replay IN", "breakdown IN", "predict IN {predict}", "predict IN {predict}", "predict IN {predict}",
         "inspect IN",
         "diff IN SEED/kineto.json", "diff SEED/kineto_linear.json IN", "opportunities IN", "ranks IN",
         "convert IN -o OUT/a.foretrace", "comm report IN", "overheads IN",
         "overheads SEED/kineto_linear.json --predict IN",
         "replay IN --timeline OUT/t.json", "replay IN --residuals --constants", "ranks IN --timeline OUT/t.json.gz",
         "sweep IN -o OUT/s.csv --jobs 1 {sweep}", "predict SEED/kineto_linear.json --host-from IN",
         "plan IN --gpus 8", "comm tune SEED/comm.json --trace IN", "inspect IN SEED/et.json",
         "predict SEED/kineto_linear.json --set batch=4096:64 --also IN",
         "models evaluate SEED/device.profile IN")

_SEEDS = ("kineto.json", "kineto.json.gz", "job", "checked/mlp", "checked", "et.json", "graph.foretrace",
          "job.foretrace", "device.profile", "comm.json", "campaign", "sweep", "nccl.log", "collectives.csv",
          "collectives.parquet", "table.csv", "table.parquet", "plan.toml", "job.toml", "device.toml", "node.toml")
KINDS: dict[str, Kind] = {
    "kineto": Kind(["kineto.json", "kineto_linear.json", "kineto_cpu.json", "kineto_2020.json"], {"": _TRACE}, _STEP),
    "kineto-gz": Kind(["kineto.json.gz"], {"": (M.gzip_bytes, M.trace_events, M.gzip_odd)}, (
        "replay IN", "inspect IN", "predict IN")),
    "job": Kind(["job"], {"": _TRACE}, _STEP),
    "execution-trace": Kind(["et.json"], {"": (*[M.json_tree] * 4, M.plain_bytes, M.json_text)}, (
        "inspect IN", "inspect SEED/kineto.json IN", "convert SEED/kineto.json IN -o OUT/a.foretrace", "replay IN",
        "comm report IN", "breakdown SEED/kineto.json IN")),
    "foretrace": Kind(["graph.foretrace", "job.foretrace", "graph_long.foretrace"], {"": _GRAPH}, _STEP),
    "profile": Kind(["device.profile"], {"": (*[M.profile_file] * 8, M.zip_odd)}, (
        "price aten::linear --shapes 32x64,128x64 --device h200-sxm --profile IN",
        "price aten::layer_norm --shapes 32x64 --device h200-sxm --profile IN --json",
        "models list IN", "models evaluate IN SEED/table.csv", "predict SEED/kineto_linear.json --profile IN {predict}",
        "opportunities SEED/kineto_linear.json --profile IN", "check SEED/checked --profile IN",
        "predict SEED/kineto_linear.json --device h200-sxm --profile IN")),
    "comm-profile": Kind(["comm.json"], {"": (*[M.json_tree] * 4, M.plain_bytes, M.json_text)}, (
        "comm predict all_reduce --bytes 1MiB --comm-profile IN {comm}", "comm tune IN",
        "comm tune IN SEED/comm.json --csv OUT/t.csv",
        "comm tune IN --trace SEED/job", "predict SEED/job --comm-profile IN {predict}",
        "comm predict all_gather --bytes 1GB --ranks 4 --comm-profile IN --json",
        "ranks SEED/kineto_linear.json --parallel ddp=4 --comm-profile IN")),
    "capture": Kind(["checked/mlp"], {
        "context.json": (*[M.json_tree] * 4, M.json_text), "collectives.json": (M.json_tree,),
        ".json.gz": (M.gzip_bytes, M.gzip_json, M.trace_events, M.gzip_odd)},
        (*_STEP, "check SEED/checked --against IN", "check IN")),
    "baseline": Kind(["checked"], {
        "baseline.json": (*[M.json_tree] * 4, M.plain_bytes, M.json_text), "context.json": (M.json_tree,),
        "": (M.gzip_bytes, M.gzip_odd)}, (
        "check IN", "check IN --json", "check IN --against SEED/checked", "check SEED/checked --against IN",
        "check IN --update-baseline --reason because", "check IN --junit OUT/a.xml --markdown OUT/a.md")),
    "campaign": Kind(["campaign"], {
        "campaign.json": (M.json_tree,), ".jsonl": (M.json_lines,), ".parquet": (M.parquet_table,)}, (
        "campaign status IN", "campaign status IN --json", "fit IN -o OUT/a.profile",
        "models evaluate SEED/device.profile IN",
        "campaign run SEED/plan.toml --out IN --resume --minutes 0.001 --part 7")),
    "sweep": Kind(["sweep"], {".journal": (M.json_lines, M.json_lines, M.plain_bytes), ".csv": (M.table_text(","),),
                              ".json": (M.trace_events,)}, (
        "sweep IN/trace.json --clock 1,2 --jobs 1 -o IN/points.csv",
        "sweep IN/trace.json --clock 1,2 --jobs 1 -o IN/points.csv --json --best time")),
    "log": Kind(["nccl.log", "param.log"], {"": (M.log_text, M.log_text, M.plain_bytes)}, (
        "comm fit IN -o OUT/c.json --topology dgx-h100 {fit}",
        "comm fit IN SEED/nccl.log -o OUT/c.json --topology dgx-h100x2 --ranks 8 --collective all_reduce --json")),
    "comm-table": Kind(["collectives.csv", "collectives.tsv", "collectives.jsonl", "collectives.parquet"], {
        ".csv": (M.table_text(","), M.table_text(","), M.plain_bytes), ".tsv": (M.table_text("\t"),),
        ".jsonl": (M.json_lines,), ".parquet": (M.parquet_table,)}, (
        "comm fit IN -o OUT/c.json --topology dgx-h100 {fit}", "comm fit IN -o OUT/c.json --topology dgx-h100 --json")),
    "table": Kind(["table.csv", "table.parquet"], {
        ".csv": (M.table_text(","), M.table_text(","), M.plain_bytes), ".parquet": (M.parquet_table,)}, (
        "models evaluate SEED/device.profile IN", "models evaluate SEED/device.profile IN --json")),
    "plan-toml": Kind(["plan.toml"], {"": (M.toml_text, M.toml_text, M.plain_bytes)}, (
        "campaign run IN --out OUT/c --part 1000000",)),
    "device-toml": Kind(["device.toml"], {"": (M.toml_tree, M.toml_tree, M.toml_text, M.plain_bytes)}, (
        "devices IN", "devices IN --json", "devices IN --toml", "predict SEED/kineto_linear.json --device IN",
        "predict SEED/kineto_linear.json --device IN {predict} --json", "predict SEED/kineto.json --from-device IN",
        "price aten::linear --shapes 32x64,128x64 --device IN", "sweep SEED/kineto_linear.json --device IN,b200 -o "
        "OUT/s.csv --jobs 1", "opportunities SEED/kineto_linear.json --device IN",
        "price aten::mm --shapes 4x4,4x4 --dtype {word} --device IN --json")),
    "topology-toml": Kind(["node.toml"], {"": (M.toml_tree, M.toml_tree, M.toml_text, M.plain_bytes)}, (
        "topologies IN", "topologies IN --json", "topologies IN --toml", "predict SEED/job --topology IN {predict}",
        "predict SEED/job --topology INx{number} --from-topology IN", "comm predict all_reduce --bytes {size} "
        "--topology INx4 {comm}", "comm predict all_to_all --bytes 1MiB --topology INx2@mine --json",
        "comm fit SEED/nccl.log -o OUT/c.json --topology IN {fit}", "plan llama --gpus 16 --topology IN",
        "sweep SEED/job --topology IN,INx2 -o OUT/s.csv --jobs 1", "comm tune SEED/comm.json --topology IN")),
    "job-toml": Kind(["job.toml"], {"": (M.toml_text, M.toml_text, M.plain_bytes)}, (
        "comm report SEED/job --job IN", "comm report SEED/job.foretrace --job IN --json")),
    # Sound files, odd options.
    "options": Kind(["kineto_linear.json", "kineto.json", "job", "kineto_cpu.json", "graph.foretrace", "checked/mlp"],
                    {}, (
        "predict IN {predict} {predict} {predict}", "predict IN {predict} {predict} --json",
        "predict IN {predict} --json",
        "sweep IN -o OUT/s.csv --jobs 1 {sweep} {sweep}", "sweep IN -o OUT/s.parquet --jobs 1 {sweep} --json",
        "replay IN --scale-kernels {number}", "replay IN --scale-kernels {number} --timeline OUT/t.json --json",
        "breakdown IN --step {word} --top {number}", "diff IN SEED/kineto.json --step {word} --step-b {word}",
        "opportunities IN --step {word} --device {word}", "ranks IN --parallel {plan} --straggler {straggler} --json",
        "ranks IN --parallel {plan} {predict}", "plan IN --gpus {number} --parallel {plan} --launch-us {number}",
        "price aten::linear --shapes {shapes} --device {device} --json",
        "price {word} --shapes {shapes} --value {word}={number}",
        "price aten::convolution --shapes 1x3x8x8,4x3x3x3 --value stride={number} --dtype {word}",
        "price aten::mm --shapes {shapes} --dtype {word} --backward",
        "comm predict {word} --bytes {size} --topology {topology} {comm}",
        "comm predict all_reduce --bytes {size} --topology {topology} {comm} --json",
        "comm predict all_to_all --sizes {numbers} --topology dgx-h100 --ranks {number} {comm}",
        "comm report IN --window {number}", "inspect IN --window {number}", "check IN --tolerance {number}",
        "overheads IN --top {number}", "comm fit SEED/nccl.log -o OUT/c.json --topology {topology} {fit}",
        "models list {word}", "comm tune SEED/comm.json --default {word}", "campaign status {word}", "inspect {word}",
        "predict IN --set {set} --also IN:{set}",
        "campaign run {word} --out OUT/c --part {number} --minutes {number}")),
    # Files of a kind where another is expected, damaged by what fits no kind.
    "mixed": Kind(_SEEDS, {"": (M.nothing, M.nothing, M.plain_bytes, M.json_text)}, ()),
    # Links, pipes and directories where files are expected, and the other way about.
    "odd-file": Kind(_SEEDS, {}, ()),
    # File names.
    "name": Kind(["kineto.json"], {}, ("inspect IN", "replay IN", "ranks IN", "diff IN IN",
                                       "convert IN -o OUT/{name}")),
}
_ALL_COMMANDS = [command for name, kind in KINDS.items() for command in kind.commands if name != "sweep"]
_ODD = ["fifo", "directory", "/dev/zero", "/dev/full", "/dev/stdin", "nowhere", "../in", ".", "/etc/passwd",
        "/proc/self/mem", "\x1b[31m"]
_WEIGHTS = {"mixed": 5, "odd-file": 2, "device-toml": 2, "topology-toml": 2,
            "kineto": 6, "job": 3, "foretrace": 4, "profile": 3, "comm-profile": 2,
            "capture": 3, "baseline": 2,
            "options": 6,
            "log": 2, "comm-table": 2}

_FACTORS = ["0", "1", "0.5", "2", "1e15", "1e18", "1e300", "1e308", "-1", "nan", "inf", "-inf", "1e-300", "1e-9", "",
            "x",
            "9" * 5000, "1,5", "٣", "0x10", "1e400", "1_000", "½", "1e6", "\x1b[31m", " 2"]
_WORDS = ["", "x", "0", "-1", "99999999999999999999", "ProfilerStep#2", "ProfilerStep#99", "nan", "h100-sxm", "cpu",
          "\x1b[2J",
          "é" * 300, "\u202e", "x" * 5000, "../..", "/dev/null", "IN/", "aten::mm", "aten::softmax", "bf16", "fp64",
          "int8",
          "float32", "all_reduce", "broadcast", "gloo", "=", ",", ":", "NaN", "nosuchprotocol://a/b", "*", "[",
          "\udcff"]
_SIZES = ["0", "1", "1MiB", "64MiB", "1.5GB", "-1", "1e300GB", "nan", "", "infB", "9" * 5000, "1e308", "10^9", "1TiB",
          "1e-9",
          "1e25", "1PB", "99999999999GiB"]
_DEVICES = ["h200-sxm", "b200", "mi300x", "cpu", "p4", "x", "", "H100"]
_TOPOLOGIES = ["dgx-h100", "dgx-h100x4", "dgx-h200x8", "dgx-h100x0", "dgx-h100x999999999", "dgx-h100x-1", "x", "",
               "dgx-a100@ib",
               "dgx-h100x4@x", "dgx-h100x4@400", "dgx-h100x" + "9" * 5000, "pcie", "cpu", "dgx-h100x1000000",
               "dgx-b200x9999"]
_PLANS = ["ddp=8", "ddp=2", "fsdp2=4", "tp=2", "ddp=0", "ddp=-1", "ddp=1e9", "ddp=30000000",
          "ddp=99999999999999999999", "x", "",
          "ddp", "ddp=2,ddp=3", "ddp=nan", "tp=2,ddp=2", "pp=4", "ep=8", "ddp=64", "ddp=" + "9" * 5000, "=", "ddp=4096"]
_STRAGGLERS = ["0:10%", "1:50%", "0:1e308%", "0:-50%", "0:nan%", "99:10%", "-1:5%", "0:inf%", "x", "0:0%", "0:1e15%",
               "0:-100%",
               "0:", ":", "0:10", "9999999999999999999:10%", "0:1e400%"]
_SHAPES = ["32x64,128x64", "32x64,64x128", "0x0,0x0", "-1x5,5x5", "1x1", "", "x", "99999999999x99999999999,1x1",
           "1e5x3,3x3",
           "2147483648x2,2x2", "1x2x3x4x5x6x7x8x9", "3000000000x3000000000,3000000000x3000000000", "9" * 5000 + "x1",
           "1", ",",
           "4x4,4x4", "32x64,128x64,128", "٣x٣,٣x٣"]
_SETS = ["batch=4096:64", "batch=64", "batch=1", "batch=0", "batch=-5", "batch=4096:4294967296",
         "batch=4096:9223372036854775807",
         "batch=nan", "batch=1e308", "x=3", "batch", "=", "seq=1024:16", "batch=4096:1024:3", "batch=0:5",
         "batch=" + "9" * 5000,
         "batch=4096:1", "seq=1024:1073741824", "batch=32:16", "dim=64:8", "é=2", "batch=٣", "batch=4096:4096",
         "batch=8:1e9"]
_COUNTS = ["1", "0", "-1", "2", "8", "1000", "30000000", "9" * 25, "x", "nan"]
_NAMES = ["node-20240115_77.1700000000.pt.trace.json", "rank30000000.json", "rank-1.json", "rank٣.json",
          "a\x1b[31mb.json",
          "a\nb.json", "é.json", "rank99999999999999999999.json", "trace_rank_5.json",
          "worker0.1700000000000.pt.trace.json",
          "x" * 200 + ".json", "rank[0-3].json", "a b.json", "-o.json", "rank0_rank1.json", "%s.json", "20240115.json",
          "host_1234567.1699999999.pt.trace.json", "0.json", "gpu7.json", "rank²0.json"]


def _option(r: Random, group: str) -> list[str]:
    if group == "predict":
        name, values = r.choice([
            ("--host", _FACTORS), ("--clock", _FACTORS), ("--bandwidth", _FACTORS), ("--kernels", _FACTORS),
            ("--straggler", _STRAGGLERS), ("--parallel", _PLANS), ("--set", _SETS), ("--set", _SETS), ("--device",
                                                                                                       _DEVICES),
            ("--from-device", _DEVICES), ("--topology", _TOPOLOGIES), ("--from-topology", _TOPOLOGIES),
            ("--dtype", _WORDS), ("--step", _COUNTS), ("--price", _FACTORS), ("--top", _COUNTS), ("--window", _COUNTS),
            ("--recompute", ["on", "off", "x", ""]), ("--comm-backend", _WORDS), *[(f"--{flag}",
                                                                                    None) for flag in _FLAGS]])
    elif group == "sweep":
        name, values = r.choice([
            ("--set", [f"batch=4096:{','.join(part)}" for part in (["64", "8"], ["0"], ["-1"], ["x"], ["1"] * 30)]),
            ("--clock", ["1,2", "0", "nan", "1e300", ",", "", "-1,1", "x"]), ("--host", ["0.5,1", "1e308", "nan",
                                                                                         "inf"]),
            ("--bandwidth", ["1,1e15", "0", "1e-300"]), ("--world-size", ["1,2", "0", "-1", "30000000", "x"]),
            ("--device", ["b200,h100-sxm", "x", ""]), ("--straggler", ["0:10%,1:5%", "0:1e308%", "x"]),
            ("--topology", ["dgx-h100,dgx-h100x2", "x", "dgx-h100x999999999"]), ("--dtype", ["bf16,fp16", "x", ""]),
            ("--edits", ["none,cuda-graphs", "x", "compile+no-waits", "", ","]), ("--price", _FACTORS),
            ("--best", ["time", "cost", "throughput", "x"]), ("--memory-limit", _SIZES), ("--top", _COUNTS)])
    elif group == "comm":
        name, values = r.choice([
            ("--oversubscription", _FACTORS), ("--sharing", _COUNTS), ("--ranks", _COUNTS), ("--dtype", _WORDS),
            ("--group", ["0-7", "0-7,16", "0-63:8", "0", "", "x", "7-0", "0-99999999999", "0-7:0", "-1", "0,0",
                         "0-3,2"]),
            ("--algorithm", ["ring", "tree", "x", "", "nvls", "hierarchical"]), ("--backend", _WORDS)])
    else:
        name, values = r.choice([
            ("--ranks", _COUNTS), ("--per-node", _COUNTS), ("--collective", ["all_reduce", "x", "", "broadcast"]),
            ("--dtype", _WORDS), ("--backend", _WORDS), ("--gpu", _WORDS), ("--system", _WORDS)])
    return [name] if values is None else [name, r.choice(values)]


_FLAGS = ["profiled", "cuda-graphs", "no-data-loading", "fused-optimizer", "fuse-elementwise", "flash-attention",
          "overlap-loading", "compile", "free-launches", "no-waits", "hide-collectives"]
_VALUES = {"number": _FACTORS, "word": _WORDS, "plan": _PLANS, "straggler": _STRAGGLERS, "shapes": _SHAPES,
           "size": _SIZES,
           "device": _DEVICES, "topology": _TOPOLOGIES, "set": _SETS, "name": _NAMES,
           "numbers": ["1,2,3,4,5,6,7,8", "0", "", "-1,2", "1e308,1", "nan", "x,y", ",".join(["1"] * 8)]}


def _arguments(r: Random, template: str, target: str) -> list[str]:
    found: list[str] = []
    for word in template.split(" "):
        if word in ("{predict}", "{sweep}", "{comm}", "{fit}"):
            if r.random() < 0.7 or word == "{sweep}":
                found += _option(r, word[1:-1])
        elif word == "IN" or re.match(r"IN[/,x]", word):
            found.append(re.sub(r"\bIN(?=[/,x@]|$)", f"{INPUT}/{target}".replace("\\", ""), re.sub(
                r"\{(\w+)\}", lambda m: r.choice(_VALUES[m[1]]), word)))
        elif word.startswith("IN:"):
            found.append(f"{INPUT}/{target}:" + r.choice(_VALUES[word[4:-1]]))
        else:
            found.append(re.sub(r"\{(\w+)\}", lambda m: r.choice(_VALUES[m[1]]), word))
    # What no program can be given.
    return [each.replace("\0", "") for each in found]


@lru_cache(maxsize=64)
def _files(seed: Path) -> dict[str, bytes]:
    if seed.is_file():
        return {seed.name: seed.read_bytes()}
    return {f"{seed.name}/{path.relative_to(seed)}": path.read_bytes()
            for path in sorted(seed.rglob("*")) if path.is_file()}


def draw_case(r: Random, seeds: Path, kinds: Sequence[str] = ()) -> Case:
    """Draw a case.

    Args:
        r: makes every choice.
        seeds: what ``fuzz_seeds.build_seeds`` wrote.
        kinds: only these.
    """
    names = [name for name in (kinds or KINDS) for _ in range(_WEIGHTS.get(name, 1))]
    name = r.choice(names)
    kind = KINDS[name]
    seed = r.choice(list(kind.seeds))
    files = dict(_files(seeds / seed))
    target = Path(seed).name
    template = r.choice(list(kind.commands) or _ALL_COMMANDS)
    if name == "name":
        target = r.choice(_NAMES)
        files = {target: next(iter(files.values()))}
    elif kind.damage:
        for _ in range(r.choice([1, 1, 1, 2])):
            path = r.choice([path for path in files if _fitting(kind, path)])
            files[path] = _damaged(r, kind, path, files[path])
        if len(files) > 1 and r.random() < 0.05:
            files.pop(r.choice(list(files)))
    odd: dict[str, str] = {}
    if name == "odd-file":
        odd[r.choice([*files, *({target, str(Path(next(iter(files))).parent)} - {"."})])] = r.choice(_ODD)
    return Case(name, files, _arguments(r, template, target), odd)


def _fitting(kind: Kind, path: str) -> Sequence[Mutator]:
    endings = [ending for ending in kind.damage if path.endswith(ending)]
    return kind.damage[max(endings, key=len)] if endings else ()


def _damaged(r: Random, kind: Kind, path: str, data: bytes) -> bytes:
    mutate = r.choice(list(_fitting(kind, path)))
    try:
        return mutate(r, data)
    except Exception:
        # A second mutation of what the first has broken beyond its form.
        return mutators.plain_bytes(r, data)


def keep(case: Case, folder: Path, about: dict[str, object]) -> None:
    """Keep a case: its files and ``case.json``."""
    for name, content in case.files.items():
        path = folder / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (folder / "case.json").write_text(json.dumps(
        {"kind": case.kind, "arguments": case.arguments, **({"odd": case.odd} if case.odd else {}), **about}, indent=1))


def kept(folder: Path) -> Case:
    """A case that was kept."""
    about = json.loads((folder / "case.json").read_text())
    root = folder / "in"
    files = {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}
    return Case(about["kind"], files, about["arguments"], about.get("odd", {}))
