"""Odd options of every command, found in the commands themselves: a new option is tried as soon as there is one.

    arguments = draw_option(r, "comm predict")
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from importlib import import_module
from random import Random
from typing import Annotated, Any, get_args, get_origin

NUMBERS = ["0", "1", "0.5", "2", "1e15", "1e18", "1e300", "1e308", "-1", "nan", "inf", "-inf", "1e-300", "1e-9", "",
           "x", "9" * 5000, "1,5", "٣", "0x10", "1e400", "1_000", "½", "1e6", "\x1b[31m", " 2", "-0", "1e-320",
           "9" * 400 + ".5", "2147483648", "9223372036854775808"]
COUNTS = ["1", "0", "-1", "2", "8", "1000", "30000000", "9" * 25, "x", "nan", "", "2147483648", "9223372036854775807",
          "1e3", "٣", "9" * 5000, "-9223372036854775809", "1.0", "4"]
WORDS = ["", "x", "0", "-1", "99999999999999999999", "ProfilerStep#2", "ProfilerStep#99", "nan", "h100-sxm", "cpu",
         "\x1b[2J", "é" * 300, "\u202e", "x" * 5000, "../..", "/dev/null", "IN/", "aten::mm", "aten::softmax", "bf16",
         "fp64", "int8", "float32", "all_reduce", "broadcast", "gloo", "=", ",", ":", "NaN", "nosuchprotocol://a/b",
         "*", "[", "\udcff", "on", "off", "ring", "a b", "%s%n", "'; DROP", "{}", "\\", "\n"]
SIZES = ["0", "1", "1MiB", "64MiB", "1.5GB", "-1", "1e300GB", "nan", "", "infB", "9" * 5000, "1e308", "10^9", "1TiB",
         "1e-9", "1e25", "1PB", "99999999999GiB", "80GiB", "1 MiB", "MiB", "٣MiB", "1e4000B"]
DEVICES = ["h200-sxm", "b200", "mi300x", "cpu", "p4", "x", "", "H100", "SEED/device.toml", "SEED/node.toml",
           "SEED/checked", "x.toml", "a100-sxm-80gb,b200"]
TOPOLOGIES = ["dgx-h100", "dgx-h100x4", "dgx-h200x8", "dgx-h100x0", "dgx-h100x999999999", "dgx-h100x-1", "x", "",
              "dgx-a100@ib", "dgx-h100x4@x", "dgx-h100x4@400", "dgx-h100x" + "9" * 5000, "pcie", "cpu",
              "dgx-h100x1000000", "dgx-b200x9999", "SEED/node.toml", "SEED/node.tomlx2", "SEED/node.tomlx2@mine",
              "SEED/node.tomlx0", "SEED/device.toml", "@", "x2", "dgx-h100@"]
PLANS = ["ddp=8", "ddp=2", "fsdp2=4", "tp=2", "ddp=0", "ddp=-1", "ddp=1e9", "ddp=30000000", "ddp=99999999999999999999",
         "x", "", "ddp", "ddp=2,ddp=3", "ddp=nan", "tp=2,ddp=2", "pp=4", "ep=8", "ddp=64", "ddp=" + "9" * 5000, "=",
         "ddp=4096", "dp=8,tp=4,pp=2,microbatches=16", "dp=2,tp=2,pp=2", "pp=2,microbatches=0", "tp=3", "cp=2", "ddp=٣",
         "ddp=4,", ",", "dp=1e300", "microbatches=4", "fsdp2=2,tp=2,pp=2", "zero=3"]
STRAGGLERS = ["0:10%", "1:50%", "0:1e308%", "0:-50%", "0:nan%", "99:10%", "-1:5%", "0:inf%", "x", "0:0%", "0:1e15%",
              "0:-100%", "0:", ":", "0:10", "9999999999999999999:10%", "0:1e400%", "٣:1%", "0:" + "9" * 5000 + "%"]
SHAPES = ["32x64,128x64", "32x64,64x128", "0x0,0x0", "-1x5,5x5", "1x1", "", "x", "99999999999x99999999999,1x1",
          "1e5x3,3x3", "2147483648x2,2x2", "1x2x3x4x5x6x7x8x9", "3000000000x3000000000,3000000000x3000000000",
          "9" * 5000 + "x1", "1", ",", "4x4,4x4", "32x64,128x64,128", "٣x٣,٣x٣", "2x8x16x64,2x8x16x64,2x8x16x64",
          "100x16,8x4", "x".join(["2"] * 300), ",".join(["2x2"] * 300), "1x3x8x8,4x3x3x3", "0", "0x4,4x0"]
SETS = ["batch=4096:64", "batch=64", "batch=1", "batch=0", "batch=-5", "batch=4096:4294967296",
        "batch=4096:9223372036854775807", "batch=nan", "batch=1e308", "x=3", "batch", "=", "seq=1024:16",
        "batch=4096:1024:3", "batch=0:5", "batch=" + "9" * 5000, "batch=4096:1", "seq=1024:1073741824", "batch=32:16",
        "dim=64:8", "é=2", "batch=٣", "batch=4096:4096", "batch=8:1e9", "batch=32:64", "seq=64:128", "", "batch=32:0",
        "batch=32:-1", "batch=-32:64", "batch=32:9007199254740993", "batch=1:2", "batch=2:1", "width=64:65", ":",
        "batch=:", "batch=32:", "batch=:32", "batch=4,seq=8", "\x1b[31m=1", "batch=4:16", "depth=1:2"]
OPERATIONS = ["aten::linear", "aten::mm", "aten::addmm", "aten::bmm", "aten::convolution", "aten::layer_norm",
              "aten::native_layer_norm", "aten::_softmax", "aten::gelu", "aten::add", "aten::embedding",
              "aten::embedding_bag", "aten::_scaled_dot_product_flash_attention", "aten::cumsum", "aten::topk",
              "aten::sort", "aten::lstm", "aten::nll_loss_forward", "aten::max_pool2d", "aten::_foreach_add_",
              "aten::x", "linear", "", "x", "vllm::moe", "aten::native_batch_norm", "aten::copy_", "aten::index_select",
              "aten::scatter", "aten::mean", "aten::dropout", "\x1b[31m", "aten::convolution_backward"]
FILES = ["SEED/device.profile", "SEED/comm.json", "SEED/kineto.json", "SEED/table.csv", "SEED/checked", "", "nowhere",
         "/dev/null", "SEED/plan.toml", "SEED/job.toml", "SEED/campaign", "SEED/sweep/points.csv",
         "SEED/graph.foretrace", "SEED/", "SEED/collectives.parquet", "SEED/et.json", "SEED/kineto.json.gz",
         "x" * 300, "/proc/self/maps", "/dev/zero", "/dev/stdin", "/dev/full", "/proc/self/mem"]
TRACES = ["SEED/kineto_linear.json", "SEED/kineto.json", "SEED/kineto_cpu.json", "SEED/job", "SEED/graph.foretrace",
          "SEED/job.foretrace", "SEED/checked/mlp", "SEED/kineto_2020.json", "SEED/graph_long.foretrace",
          "SEED/checked", "SEED/recorded"]
OUTPUTS = ["OUT/a", "OUT/a.json", "OUT/a.csv", "OUT/a.parquet", "OUT/a.json.gz", "OUT/", "OUT/b/c", "", "/dev/null",
           "/dev/full", "/dev/stdout", ".", "OUT/\x1b[31m", "OUT/" + "x" * 300, "memory://x", "nosuchprotocol://x",
           "SEED/kineto.json/x", "OUT/a.foretrace", "OUT/é", "file:///nowhere/x", "-", "OUT/a.svg", "/proc/x"]
TYPES = ["bf16", "fp16", "fp32", "fp64", "fp8", "int8", "tf32", "float8_e4m3", "float32", "bool", "complex64", "x", "",
         "BF16", "nvfp4", "fp4", "\x1b[31m", "int64", "torch.bfloat16"]
_BY_VALUE = {
    "STEP": [*WORDS[:8], "0", "1", "-1", "-2", "2", "ProfilerStep#1"], "NAME_OR_NUMBER": WORDS[:8], "DEVICE": DEVICES,
    "CLUSTER": TOPOLOGIES, "PLAN": PLANS, "FILE": FILES, "TYPE": TYPES, "NAME=VALUE": SETS, "RANK:PERCENT%": STRAGGLERS,
    "SIZE": SIZES, "OUT.json[.gz]": OUTPUTS, "NEW": [*TRACES, *FILES], "PERCENT": ["5%", "0", "x", "nan%", "1e308%",
    "-1%", "5", "", "0.05", "1e-300", "9" * 5000 + "%"], "on|off": ["on", "off", "x", ""], "SIZES": SHAPES,
    "COLLECTIVE": ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send", "x", "", "barrier",
                   "reduce", "gather", "ALL_REDUCE", "recv", "all_to_allv", "\x1b[31m"],
    "RANKS": ["0-7", "0-7,16", "0-63:8", "0", "", "x", "7-0", "0-99999999999", "0-7:0", "-1", "0,0", "0-3,2", "0-",
              "0-1000000", "0-7:-1", "٣-٤"],
    "A,B,C": ["1,2,3,4,5,6,7,8", "0", "", "-1,2", "1e308,1", "nan", "x,y", ",".join(["1"] * 8), "1MiB,2MiB"],
    "NAME": WORDS, "BACKEND": ["nccl", "gloo", "x", "", "\x1b[31m"], "FILE.csv": OUTPUTS,
    "FILE.toml": FILES, "OPERATION": OPERATIONS, "throughput|time|cost": ["throughput", "time", "cost", "x", ""],
    "local|dask|ray": ["local", "x", ""],
    "A,B+C,…": ["none,cuda-graphs", "x", "compile+no-waits", "", ",", "none+none"],
    "N,…": ["1,2", "0", "-1", "30000000", "x", "2,2", "1" * 25],
    "FACTOR,…": ["1,2", "0", "nan", "1e300", ",", "", "-1,1", "x", "0.5", "inf"],
    "NAME=VALUE,…": [f"batch=4096:{part}" for part in ("64,8", "0", "-1", "x", ",".join("1" * 30))],
    "RANK:PERCENT%,…": ["0:10%,1:5%", "0:1e308%", "x"], "CLUSTER,…": ["dgx-h100,dgx-h100x2", "x", "dgx-h100x999999999"],
    "TYPE,…": ["bf16,fp16", "x", ""], "DEVICE,…": ["b200,h100-sxm", "x", "", "b200,b200"],
    "PATH[:NAME=SIZE,…]": [f"{path}{sizes}" for path in ("SEED/kineto_linear.json", "SEED/checked/mlp", "x", "")
                           for sizes in ("", ":batch=64", ":batch=x", ":", ":batch=0", ":batch=64,seq=2", ":=")],
    "SCRIPT.py:FUNCTION": ["x.py:f", "x", "", "SEED/kineto.json:f", ":", "x.py"],
    "FILE|auto": ["auto", *FILES],
    "TRACE": TRACES, "TEXT": WORDS,
    "OLDER": ["SEED/survey/table", "SEED/survey", *FILES[:6]], "TAG": ["team=ads", "x", ""],
    "SHARE": ["0", "1", "0.5", "nan", "-1", "2", "x"],
    "PROFILE|DIR": [*FILES, "SEED"], "COMMIT|DIR": ["HEAD", "x", "", "SEED"],
    "FILE.jsonl": OUTPUTS}
"""Values by the name that an option's help has for them; PATH is an input's or an output's."""
_SOUND = {
    "STEP": ["0", "-1", "1"], "NAME_OR_NUMBER": ["0", "1"], "DEVICE": ["h200-sxm", "b200", "mi300x", "a100-sxm-80gb"],
    "CLUSTER": ["dgx-h100", "dgx-h200x2", "SEED/node.tomlx2"], "PLAN": ["ddp=2", "ddp=8", "dp=8,microbatches=2"],
    "TYPE": ["bf16", "fp16", "fp32"], "NAME=VALUE": ["batch=4096:64", "batch=32:64", "seq=1024:16", "batch=4"],
    "RANK:PERCENT%": ["0:10%", "1:50%"], "SIZE": ["1MiB", "80GiB"], "PERCENT": ["5%", "0.05"], "FACTOR": ["0.5", "2"],
    "FILE": ["SEED/device.profile", "SEED/comm.json"], "FILE|auto": ["auto", "SEED/choices.json"],
    "RANKS": ["0-7", "0-3"], "BACKEND": ["nccl", "gloo"],
    "PER_HOUR": ["2"], "US": ["4"], "N": ["1", "2", "8"], "OUT.json[.gz]": ["OUT/t.json", "OUT/t.json.gz"]}
"""Values that are taken by most, so that half of the time an option is met by what works with it."""
_BY_TYPE = {int: COUNTS, float: NUMBERS, str: WORDS}
_WRITTEN = {"--plot", "--html", "--junit", "--markdown", "--csv", "--table"}
_LEFT_OUT = {"--debug", "--update-baseline", "--jobs", "--workers"}
"""What would change the seeds, or start processes."""


@dataclass(frozen=True)
class Option:
    """``name`` of an option; ``values`` it may be given, none for a flag."""

    name: str
    values: tuple[str, ...] | None
    sound: tuple[str, ...] = ()


@lru_cache(maxsize=1)
def commands() -> dict[str, list[Option]]:
    """What every command may be given, by its words; what it needs is in the templates."""
    from foretrace.commands import COMMANDS

    found: dict[str, list[Option]] = {}
    for name, command in COMMANDS.items():
        made = getattr(import_module(command.module), command.attribute)
        callbacks = [(name, made)] if not hasattr(made, "registered_commands") else _callbacks(made, f"{name} ")
        found |= {words: list(_options(callback)) for words, callback in callbacks}
    return found


def draw_option(r: Random, command: str) -> list[str]:
    """Draw one of a command's options, with a value if it takes one."""
    free = commands()[command]
    if not free:
        return []
    option = r.choice(free)
    if option.values is None:
        return [option.name]
    return [option.name, r.choice(option.sound if option.sound and r.random() < 0.5 else option.values)]


def _callbacks(app: Any, before: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    for each in app.registered_commands:
        name = each.name or each.callback.__name__
        yield f"{before}{name}", each.callback


def _options(callback: Callable[..., Any]) -> Iterator[Option]:
    for name, parameter in inspect.signature(callback, eval_str=True).parameters.items():
        hint = parameter.annotation
        kind, *about = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        if not about or type(about[0]).__name__ != "OptionInfo":
            continue
        info = about[0]
        # Beside an annotation typer takes the first name for a default, until it makes the command.
        declared = [text for text in (info.default, *(info.param_decls or ())) if isinstance(text, str)]
        names = [text.partition("/")[0] for text in declared if text.startswith("--")]
        names = names or [f"--{name.replace('_', '-')}"]
        if names[0] in _LEFT_OUT or parameter.default is inspect.Parameter.empty:
            continue
        yield Option(names[0], _values(kind, info.metavar, names[0]), tuple(_SOUND.get(info.metavar, ())))


def _values(kind: Any, value: str | None, name: str) -> tuple[str, ...] | None:
    inner = next((part for part in get_args(kind) if part is not type(None)), kind)
    inner = next(iter(get_args(inner)), inner)
    if inner is bool:
        return None
    if isinstance(inner, type) and issubclass(inner, Enum):
        return (*(each.value for each in inner), "x", "")
    if name in _WRITTEN:
        return tuple(OUTPUTS)
    if value == "PATH":
        return tuple(TRACES + FILES if name == "--host-from" else OUTPUTS)
    if inner is str and value in _BY_VALUE:
        return tuple(_BY_VALUE[value])
    return tuple(_BY_TYPE.get(inner, WORDS))
