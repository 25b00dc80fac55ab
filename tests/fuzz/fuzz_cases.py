"""A case: damaged input files and a command that reads them, with odd options now and then.

``draw_case`` takes every choice from one ``random.Random``.
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

import fuzz_foreign as foreign
import fuzz_mutators as mutators
import fuzz_options as options
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
    stdout: str = ""
    """Where its output goes: "" is a file; "full" and "gone" cannot take it."""

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
    """The first one does little more than to read: most cases are of it."""


M, F = mutators, foreign
_TRACE = (*[M.trace_events] * 6, *[M.json_tree] * 2, M.plain_bytes, M.json_text, F.json_bomb, F.nested_ranges)
_TABLE = {".csv": (M.table_text(","), M.table_text(","), M.plain_bytes, F.table_bomb(",")),
          ".tsv": (M.table_text("\t"), F.table_bomb("\t")), ".jsonl": (M.json_lines, F.lines_bomb),
          ".parquet": (M.parquet_table,), ".json": (M.json_tree, M.json_tree, M.plain_bytes, M.json_text, F.json_bomb)}
_READ = ("inspect IN --json", "inspect IN", "replay IN", "breakdown IN", "breakdown IN --json", "diff IN IN",
         "convert IN -o OUT/a.foretrace", "export IN -o OUT/e.json", "memory IN")
_GRAPH = (*[M.graph_file] * 8, M.zip_odd)
_STEP = ("inspect IN --json", "inspect IN {maybe}",
         "replay IN {maybe}", "breakdown IN {maybe}", "predict IN {option}", "predict IN {option}",
         "predict IN {option}", "diff IN SEED/kineto.json {maybe}",
         "diff SEED/kineto_linear.json IN {maybe}", "opportunities IN {maybe}", "ranks IN {maybe}", "ranks IN {option}",
         "convert IN -o OUT/a.foretrace {maybe}", "comm report IN {maybe}", "overheads IN {maybe}",
         "overheads SEED/kineto_linear.json IN", "replay IN --timeline OUT/t.json",
         "replay IN --residuals --constants", "ranks IN --timeline OUT/t.json.gz {maybe}",
         "sweep IN -o OUT/s.csv --jobs 1 {option}", "predict SEED/kineto_linear.json --host-from IN {maybe}",
         "plan IN --gpus 8 {maybe}", "comm study IN --gpus 8 {maybe}", "comm tune SEED/comm.json --trace IN {maybe}",
         "inspect IN SEED/et.json",
         "predict SEED/kineto_linear.json --set batch=4096:64 --also IN",
         "models evaluate SEED/device.profile IN {maybe}", "diff IN IN {maybe}", "inspect IN IN",
         "comm report IN --job SEED/job.toml", "predict IN --device {device} {option}", "predict IN --json {maybe}",
         "breakdown IN --json --profiled", "opportunities IN --json {maybe}", "export IN -o OUT/e.json {maybe}",
         "export IN -o OUT/chakra {option}", "memory IN {maybe}", "report IN -o OUT/r.html")

_SEEDS = ("kineto.json", "kineto.json.gz", "job", "checked/mlp", "checked", "et.json", "graph.foretrace",
          "job.foretrace", "device.profile", "comm.json", "campaign", "sweep", "nccl.log", "collectives.csv",
          "collectives.parquet", "table.csv", "table.parquet", "plan.toml", "job.toml", "device.toml", "node.toml",
          "nsys.sqlite",          "rocprof.json", "snapshot.pickle", "topo.txt", "topo.xml", "embeddings.csv")
KINDS: dict[str, Kind] = {
    "kineto": Kind(["kineto.json", "kineto_linear.json", "kineto_cpu.json", "kineto_2020.json"], {"": _TRACE}, _STEP),
    "kineto-gz": Kind(["kineto.json.gz"], {"": (M.gzip_bytes, M.trace_events, M.gzip_odd)}, (
        "inspect IN", "replay IN", "predict IN")),
    "modules": Kind(["kineto_modules.json"], {"": (M.trace_events, F.json_bomb, *[F.nested_ranges] * 3)}, _READ),
    "nsys": Kind(["nsys.sqlite"], {"": (*[F.sqlite_rows] * 4, *[F.sqlite_pages] * 2, M.plain_bytes)}, _READ),
    "rocprof": Kind(["rocprof.json"], {"": (*[M.json_tree] * 3, *[F.json_bomb] * 3, M.json_text, M.plain_bytes)},
                    _READ),
    "rocprof-gz": Kind(["rocprof.json.gz"], {"": (F.json_bomb, M.gzip_bytes, M.gzip_odd)}, _READ),
    "snapshot": Kind(["snapshot.pickle"], {"": (*[F.pickle_tree] * 3, *[F.pickle_operations] * 2, M.plain_bytes)}, (
        "memory IN", "memory IN --json", "memory IN --memory-of {count}")),
    "node-map": Kind(["topo.xml", "topo.txt"], {".xml": (*[F.xml_attributes] * 4, M.plain_bytes),
                                                ".txt": (*[F.node_table] * 4, M.plain_bytes)}, (
        *["topologies mine --from IN --device {device}"] * 2, *["topologies mine --from IN --device h100-sxm"] * 3)),
    "embeddings": Kind(["embeddings.csv", "embeddings.json"], _TABLE, (
        "shard IN --gpus 2 --kinds table_wise", "shard IN --gpus 2", "shard IN --gpus 2 --json")),
    "indices": Kind(["indices.csv", "indices.parquet"], _TABLE, (
        "price aten::embedding_bag --shapes 1000x64,128,32 --device h200-sxm --indices IN",)),
    "inspector": Kind(["inspector.log"], {"": (*[M.json_lines] * 3, *[F.json_bomb] * 2, F.lines_bomb, M.plain_bytes)}, (
        "comm fit IN -o OUT/c.json --topology dgx-h100", "comm fit IN -o OUT/c.json --topology dgx-h100x2 --json")),
    "job": Kind(["job"], {"": _TRACE}, _STEP),
    # Of a real recording, and files of one's own that are given to ``fuzz_run.py --traces``.
    "recorded": Kind(["recorded"], {"graph.foretrace": _GRAPH, "context.json": (M.json_tree,)},
                     (*_STEP, "check SEED/checked --against IN")),
    "given": Kind(["given/*"], {".json": _TRACE, ".gz": (M.gzip_bytes, M.gzip_odd, *[M.trace_events] * 6, M.gzip_json),
                                ".foretrace": _GRAPH, ".parquet": (M.parquet_table,)}, _STEP),
    "execution-trace": Kind(["et.json"], {"": (*[M.json_tree] * 4, M.plain_bytes, M.json_text)}, (
        "inspect IN", "inspect SEED/kineto.json IN", "convert SEED/kineto.json IN -o OUT/a.foretrace", "replay IN",
        "comm report IN", "breakdown SEED/kineto.json IN")),
    "foretrace": Kind(["graph.foretrace", "job.foretrace", "graph_long.foretrace"], {"": _GRAPH}, _STEP),
    "profile": Kind(["device.profile"], {"": (*[M.profile_file] * 8, M.zip_odd)}, (
        "price aten::linear --shapes 32x64,128x64 --device h200-sxm --profile IN",
        "price aten::layer_norm --shapes 32x64 --device h200-sxm --profile IN --json",
        "models list IN", "models evaluate IN SEED/table.csv", "predict SEED/kineto_linear.json --profile IN {option}",
        "opportunities SEED/kineto_linear.json --profile IN", "check SEED/checked --profile IN",
        "predict SEED/kineto_linear.json --device h200-sxm --profile IN")),
    "comm-profile": Kind(["comm.json", "choices.json"], {"": (*[M.json_tree] * 4, M.plain_bytes, M.json_text)}, (
        "comm predict all_reduce --bytes 1MiB --comm-profile IN {option}", "comm tune IN",
        "comm tune IN SEED/comm.json --csv OUT/t.csv",
        "comm tune IN --trace SEED/job", "predict SEED/job --comm-profile IN {option}",
        "predict SEED/job --comm-choices IN {option}", "comm backends IN SEED/nccl.log -o OUT/b.json {option}",
        "comm backends mine=IN SEED/choices.json -o OUT/b.json", "shard dlrm --gpus 2 --comm-choices IN",
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
    "measured": Kind(["measured"], {"campaign.json": (M.json_tree,), ".parquet": (M.parquet_table,)}, (
        "fit IN -o OUT/a.profile {maybe}", "models evaluate SEED/device.profile IN", "campaign status IN",
        "fit IN -o OUT/a.profile --family gemm")),
    "sweep": Kind(["sweep"], {".journal": (M.json_lines, M.json_lines, M.plain_bytes), ".csv": (M.table_text(","),),
                              ".json": (M.trace_events,)}, (
        "sweep IN/trace.json --clock 1,2 --jobs 1 -o IN/points.csv",
        "sweep IN/trace.json --clock 1,2 --jobs 1 -o IN/points.csv --json --best time")),
    "survey": Kind(["survey"], {".parquet": (M.parquet_table,), ".json": _TRACE}, (
        "survey show IN/table --since SEED/survey/table", "survey show IN/table {option} {maybe}",
        "survey show SEED/survey/table --since IN/table --json", "survey show IN {option}",
        *["survey run IN/runs --workers 1 -o IN/table {maybe}"] * 3, "survey run IN --workers 1 -o OUT/s {maybe}",
        "survey run IN/runs --workers 1 -o {out} --json")),
    "log": Kind(["nccl.log", "param.log", "osu.log", "ucc.log"], {"": (M.log_text, M.log_text, M.plain_bytes)}, (
        "comm fit IN -o OUT/c.json --topology dgx-h100 {option}",
        "comm backends mine=IN SEED/choices.json -o OUT/b.json --ranks 8 {option}",
        "comm fit IN SEED/nccl.log -o OUT/c.json --topology dgx-h100x2 --ranks 8 --collective all_reduce --json")),
    "comm-table": Kind(["collectives.csv", "collectives.tsv", "collectives.jsonl", "collectives.parquet"], _TABLE, (
        "comm fit IN -o OUT/c.json --topology dgx-h100 {option}",
        "comm fit IN -o OUT/c.json --topology dgx-h100 --json")),
    "table": Kind(["table.csv", "table.parquet", *(f"{form}{ending}" for ending in (".csv", ".parquet") for form in (
        "neusight", "vidur", "attention", "operators", "generic"))], _TABLE, (
        "models evaluate SEED/device.profile IN", "models evaluate SEED/device.profile IN --json",
        "fit IN -o OUT/a.profile --device h200-sxm {maybe}")),
    "plan-toml": Kind(["plan.toml"], {"": (M.toml_text, M.toml_text, M.plain_bytes)}, (
        "campaign run IN --out OUT/c --part 1000000",)),
    "device-toml": Kind(["device.toml"], {"": (M.toml_tree, M.toml_tree, M.toml_text, M.plain_bytes)}, (
        "devices IN", "devices IN --json", "devices IN --toml", "predict SEED/kineto_linear.json --device IN",
        "predict SEED/kineto_linear.json --device IN {option} --json", "predict SEED/kineto.json --from-device IN",
        "price aten::linear --shapes 32x64,128x64 --device IN", "sweep SEED/kineto_linear.json --device IN,b200 -o "
        "OUT/s.csv --jobs 1", "opportunities SEED/kineto_linear.json --device IN",
        "price aten::mm --shapes 4x4,4x4 --dtype {word} --device IN --json")),
    "topology-toml": Kind(["node.toml"], {"": (M.toml_tree, M.toml_tree, M.toml_text, M.plain_bytes)}, (
        "topologies IN", "topologies IN --json", "topologies IN --toml", "predict SEED/job --topology IN {option}",
        "predict SEED/job --topology INx{number} --from-topology IN", "comm predict all_reduce --bytes {size} "
        "--topology INx4 {option}", "comm predict all_to_all --bytes 1MiB --topology INx2@mine --json",
        "comm fit SEED/nccl.log -o OUT/c.json --topology IN {option}", "plan llama --gpus 16 --topology IN",
        "sweep SEED/job --topology IN,INx2 -o OUT/s.csv --jobs 1", "ranks SEED/job --topology IN {option}")),
    "job-toml": Kind(["job.toml"], {"": (M.toml_text, M.toml_text, M.plain_bytes)}, (
        "comm report SEED/job --job IN", "comm report SEED/job.foretrace --job IN --json")),
    # Sound files, odd options.
    "options": Kind(["kineto_linear.json", "kineto.json", "job", "kineto_cpu.json", "graph.foretrace", "checked/mlp",
                     "recorded", "job.foretrace"], {}, (
        *["predict IN {option} {option} {option}"] * 4, "predict IN {option} {option} --json",
        "predict IN {option} --json",
        *["sweep IN -o OUT/s.csv --jobs 1 {option} {option} {option}"] * 2,
        "sweep IN -o OUT/s.parquet --jobs 1 {option} --json", "replay IN {option} {option} {option}",
        "breakdown IN {option} {option} {option}", "diff IN SEED/kineto.json {option} {option}",
        "opportunities IN {option} {option} {option}", "ranks IN {option} {option} {option}",
        "ranks IN --parallel {plan} {option} {option}", "plan IN --gpus {count} {option} {option}",
        "overheads IN {trace} {option} {option}", "convert IN -o OUT/a.foretrace {option} {option}",
        "inspect IN {option} {option}", "comm report IN {option} {option}", "check IN {option} {option} {option}",
        "check SEED/checked --against IN {option} {option}", "predict IN --set {set} --also IN:{set}",
        "models evaluate SEED/device.profile IN {option}")),
    # No file that is damaged.
    "words": Kind(["kineto_cpu.json"], {}, (
        "price {operation} --shapes {shapes} --device {device} {option} {option}",
        "price {operation} --shapes {shapes} {option} {option} {option}",
        "serve llama-3.1-8b --device {device} {option} {option}", "serve {word} --device h100-sxm {option} {option}",
        "price aten::convolution --shapes 1x3x8x8,4x3x3x3 --value stride={number} {option}",
        "price {operation} --shapes {shapes} --value {word}={number} {option}",
        "price {operation} --shapes 32x64,64x128 --dtype {type} {option}",
        "comm predict {word} --bytes {size} --topology {topology} {option} {option}",
        "comm predict all_reduce --bytes {size} --topology {topology} {option} {option} --json",
        "comm predict all_to_all --sizes {numbers} --topology dgx-h100 --ranks {count} {option}",
        "comm predict all_gather --bytes 1MiB --topology dgx-h100x2 {option} {option} {option}",
        "comm fit SEED/nccl.log -o OUT/c.json --topology {topology} {option} {option}",
        "comm fit {file} -o OUT/c.json --topology dgx-h100 {option} {option}",
        "comm tune SEED/comm.json {option} {option}", "comm tune SEED/comm.json {file} {option}",
        "campaign list {option}",
        "campaign run {file} --out OUT/c --minutes {number} --part 1000000", "campaign status {file} {option}",
        "campaign run {file} --out OUT/c --part {count} --minutes -1",
        "models list {file} {option}", "models evaluate {file} {file} {option}", "devices {device} {option} {option}",
        "topologies {topology} {option} {option}", "workloads {option}", "inspect {word}", "plan {word} --gpus {count}",
        "plan SEED/recorded --gpus 8 {option} {option}", "check {file} {option} {option}", "check {word} --base {word}",
        "convert {trace} -o {out}", "replay {trace} --timeline {out}", "sweep {trace} -o {out} --jobs 1 --clock 1,2",
        "comm fit SEED/nccl.log -o {out} --topology dgx-h100", "fit {file} -o {out} --family x {option}",
        "{word} {word}")),
    # What imports PyTorch.
    "programs": Kind(["kineto_cpu.json"], {}, (
        "capture {word} -o {out} {option} {option}", "capture -o {out} --workload {word} {option}",
        "capture {file} -o OUT/c", "calibrate -o {out} {option} --minutes -1", "calibrate -o IN/ --minutes -1",
        "calibrate -o OUT/a --minutes {word} --families x", "calibrate -o OUT/x --minutes -1 --work IN/",
        "trace {word} -o {out} {option} {option}", "trace -o {out} --workload {word} {option}", "trace {file} -o OUT/c",
        "predict {trace} --code {file} --set {set}", "plan {word} --gpus {count} {option}",
        "plan llama --gpus {count} {option}", "plan gpt2 --gpus 8 {option} {option}")),
    "by-shapes": Kind(["shapes_llama.foretrace", "shapes_dlrm.foretrace", "shapes_ddp.foretrace"], {"": _GRAPH}, (
        "predict IN --device {device} {option}", "inspect IN", "predict IN --device b200 {option} {option}",
        "plan IN --gpus 8", "breakdown IN", "predict IN --set {set}", "predict IN --parallel {plan} --device h200-sxm",
        "sweep IN -o OUT/s.csv --jobs 1 {option}", "ranks IN {option}", "opportunities IN --device h200-sxm",
        "predict IN --recompute on --device h200-sxm", "replay IN",
        "predict IN --fused-optimizer --device a100-sxm-80gb",
        "diff IN IN", "convert IN -o OUT/a.foretrace", "comm report IN")),
    "script": Kind(["script.py"], {"": (M.script,)}, (
        "trace IN:step -o OUT/a.foretrace {option}", "capture IN -o OUT/c --steps 1 --timed 1 --warmup 1 {maybe}",
        "capture IN -o OUT/c --steps {count} --timed 1", "predict SEED/kineto_linear.json --code IN:step --set {set}",
        "trace IN:{word} -o OUT/a.foretrace", "sweep SEED/kineto_linear.json --code IN:step --set batch=4096:8 "
        "-o OUT/s.csv --jobs 1")),
    "decoder": Kind(["decoder"], {"context.json": (M.json_tree,)}, (
        "plan IN --gpus 8 {option}", "predict IN --set {set} {option}", "predict IN --parallel {plan} {option}",
        "sweep IN -o OUT/s.csv --jobs 1 {option}", "ranks IN --parallel {plan}", "plan IN --gpus {count} --set {set}",
        "predict IN --set batch=8")),
    # Outputs where something is that foretrace did not write.
    "output": Kind(["notes"], {}, tuple(
        template.replace("TO", f"IN/{name}")
        for name in ("notes.txt", "trace.json", "empty", "table.csv", "notes.json", "link.json", "folder/x.json")
        for template in (
            "convert SEED/kineto.json -o TO", "convert IN/trace.json -o TO", "replay IN/trace.json --timeline TO",
            "ranks SEED/job --timeline TO", "sweep IN/trace.json -o TO --jobs 1 --clock 1,2",
            "sweep SEED/kineto_linear.json -o OUT/s.csv --plot TO --jobs 1 --clock 1,2",
            "comm fit SEED/nccl.log -o TO --topology dgx-h100", "comm tune SEED/comm.json --csv TO",
            "comm tune SEED/comm.json --out TO", "check SEED/checked --junit TO", "check SEED/checked --markdown TO",
            "campaign run SEED/plan.toml --out TO --part 1000000",
            "campaign run SEED/plan.toml --out IN/ --part 1000000", "campaign run {file} --out IN/ --resume --part 7",
            "fit SEED/table.csv --family x -o TO",
            "capture x.py --out IN/", "capture x.py --out IN/ --replace", "trace x.py:f -o TO"))),
    # Files of a kind where another is expected, damaged by what fits no kind.
    "mixed": Kind(_SEEDS, {"": (M.nothing, M.nothing, M.plain_bytes, M.json_text)}, ()),
    # Links, pipes and directories where files are expected, and the other way about.
    "odd-file": Kind(_SEEDS, {}, ()),
    # File names.
    "name": Kind(["kineto.json"], {}, ("inspect IN", "replay IN", "ranks IN", "diff IN IN",
                                       "convert IN -o OUT/{name}")),
}
QUICK = tuple(name for name in KINDS if name not in ("given", "programs", "script", "by-shapes", "decoder",
                                                        "recorded"))
"""Kinds whose cases take milliseconds."""
_ALL_COMMANDS = [command for name in QUICK for command in KINDS[name].commands if name not in ("sweep", "output")]
_READ_ONLY = 0.6
"""Share of cases whose command does little more than to read its file. What an edit makes of a damaged file costs ten
times as much, and finds less."""
_ODD = ["fifo", "directory", "/dev/zero", "/dev/full", "/dev/stdin", "nowhere", "../in", ".", "/etc/passwd",
        "/proc/self/mem", "\x1b[31m"]

_NAMES = ["node-20240115_77.1700000000.pt.trace.json", "rank30000000.json", "rank-1.json", "rank٣.json",
          "a\x1b[31mb.json",
          "a\nb.json", "é.json", "rank99999999999999999999.json", "trace_rank_5.json",
          "worker0.1700000000000.pt.trace.json",
          "x" * 200 + ".json", "rank[0-3].json", "a b.json", "-o.json", "rank0_rank1.json", "%s.json", "20240115.json",
          "host_1234567.1699999999.pt.trace.json", "0.json", "gpu7.json", "rank²0.json"]


_VALUES = {"number": options.NUMBERS, "count": options.COUNTS, "word": options.WORDS, "plan": options.PLANS,
           "straggler": options.STRAGGLERS, "shapes": options.SHAPES, "size": options.SIZES, "device": options.DEVICES,
           "topology": options.TOPOLOGIES, "set": options.SETS, "name": _NAMES, "operation": options.OPERATIONS,
           "file": options.FILES, "trace": options.TRACES, "out": options.OUTPUTS, "type": options.TYPES,
           "numbers": ["1,2,3,4,5,6,7,8", "0", "", "-1,2", "1e308,1", "nan", "x,y", ",".join(["1"] * 8)]}


@lru_cache(maxsize=512)
def _command_of(template: str) -> str:
    """The command's words, such as "comm predict", that a template begins with."""
    return max((words for words in options.commands() if f"{template} ".startswith(f"{words} ")), key=len)


def _arguments(r: Random, template: str, target: str) -> list[str]:
    found: list[str] = []
    for word in template.split(" "):
        if word in ("{option}", "{maybe}"):
            if r.random() < (0.8 if word == "{option}" else 0.2):
                found += options.draw_option(r, _command_of(template))
        elif word == "IN" or re.match(r"IN[/,x]", word):
            found.append(re.sub(r"\bIN(?=[/,x@]|$)", f"{INPUT}/{target}".replace("\\", ""), re.sub(
                r"\{(\w+)\}", lambda m: r.choice(_VALUES[m[1]]), word)))
        elif word.startswith("IN:"):
            found.append(f"{INPUT}/{target}:" + (r.choice(_VALUES[word[4:-1]]) if word[3] == "{" else word[3:]))
        else:
            found.append(re.sub(r"\{(\w+)\}", lambda m: r.choice(_VALUES[m[1]]), word))
    # What no program can be given.
    return [each.replace("\0", "") for each in found]


@lru_cache(maxsize=64)
def _seeds(folder: Path, names: tuple[str, ...]) -> list[str]:
    """Names of a kind's seeds; a pattern stands for all that there are."""
    return [found for name in names for found in (
        sorted(str(path.relative_to(folder)) for path in folder.glob(name)) if "*" in name else [name])]


@lru_cache(maxsize=64)
def _files(seed: Path) -> dict[str, bytes]:
    if seed.is_file():
        return {seed.name: seed.read_bytes()}
    return {f"{seed.name}/{path.relative_to(seed)}": path.read_bytes()
            for path in sorted(seed.rglob("*")) if path.is_file()}


def draw_case(r: Random, seeds: Path, name: str) -> Case:
    """Draw a case.

    Args:
        r: makes every choice.
        seeds: what ``fuzz_seeds.build_seeds`` wrote.
        name: its kind, one of ``KINDS``.
    """
    kind = KINDS[name]
    seed = r.choice(_seeds(seeds, tuple(kind.seeds)))
    files = dict(_files(seeds / seed))
    target = Path(seed).name
    template = kind.commands[0] if kind.damage and kind.commands and r.random() < _READ_ONLY else r.choice(
        list(kind.commands) or _ALL_COMMANDS)
    if name == "name":
        target = r.choice(_NAMES)
        files = {target: next(iter(files.values()))}
    elif kind.damage:
        for _ in range(r.choice([1, 1, 1, 2])):
            path = r.choice([path for path in files if _fitting(kind, path)])
            files[path] = _damaged(r, kind, path, files[path])
        if len(files) > 1 and r.random() < 0.1:
            mutators.folder(r, files)
    odd: dict[str, str] = {}
    if name == "odd-file":
        odd[r.choice([*files, *({target, str(Path(next(iter(files))).parent)} - {"."})])] = r.choice(_ODD)
    elif name == "output":
        odd.update({"notes/link.json": "notes.json", "notes/folder": "x.work"})
    stdout = r.choice(["full", "gone"]) if r.random() < 0.01 else ""
    return Case(name, files, _arguments(r, template, target), odd, stdout)


def _fitting(kind: Kind, path: str) -> Sequence[Mutator]:
    endings = [ending for ending in kind.damage if path.endswith(ending)]
    return kind.damage[max(endings, key=len)] if endings else ()


def _damaged(r: Random, kind: Kind, path: str, data: bytes) -> bytes:
    mutate = foreign.any_file if r.random() < 0.08 else r.choice(list(_fitting(kind, path)))
    try:
        found = mutate(r, data)
    except Exception:
        # A second mutation of what the first has broken beyond its form.
        return mutators.plain_bytes(r, data)
    return found[:32 * foreign.MOST_BYTES]  # two in turn may repeat a long line a million times


def keep(case: Case, folder: Path, about: dict[str, object]) -> None:
    """Keep a case: its files and ``case.json``."""
    for name, content in case.files.items():
        path = folder / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (folder / "case.json").write_text(json.dumps(
        {"kind": case.kind, "arguments": case.arguments, **({"odd": case.odd} if case.odd else {}),
         **({"stdout": case.stdout} if case.stdout else {}), **about}, indent=1))


def kept(folder: Path) -> Case:
    """A case that was kept."""
    about = json.loads((folder / "case.json").read_text())
    root = folder / "in"
    files = {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}
    return Case(about["kind"], files, about["arguments"], about.get("odd", {}), about.get("stdout", ""))
