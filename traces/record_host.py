"""Record small steps of several programs in turn, so that the machine's changing speed meets all of them alike.

    OMP_NUM_THREADS=1 python traces/record_host.py traces/host [--rounds 12] [--keep 6] [--workloads dlrm,bert]
                                                              [--programs distilbert,gru_tagger]
                                                              [--parallel bert:fsdp2,moe:ddp] [--count-python]

One process builds the workloads at their preset ``tiny``, whose computing is next to nothing, programs of others
(``benchmarks/foreign_programs``) at small sizes, and workloads under a parallel plan as rank 0 of two in a fake world,
whose collectives take no time, so that what is left of the plan is its hooks. It then goes round: of each some steps
timed with nothing watching, then some profiled, then the next one. A virtual machine's core is half as fast while a
neighbour uses its other thread; captures made one after the other, minutes apart, differ by that, and captures of one
round do not. Each capture is a directory ``OUT/<program>/round<n>`` that foretrace reads. With ``--count-python``
nothing is timed: calls of Python functions between operations, which no machine changes, are counted in one step of
each program and written into the captures that are there.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from contextlib import ExitStack
from functools import lru_cache, partial
from pathlib import Path
from types import ModuleType

import torch

from tracer.campaign.host_rounds import FIRST_STEPS, Program, RoundPlan, record_rounds
from tracer.capture.merge import note_python_calls
from tracer.capture.notes import PythonNotes
from tracer.graph import ExecutionGraph
from tracer.workloads import as_plain, create, parse, split

SUITE = ("dlrm", "resnet50", "bert", "llama", "gpt2", "vit", "moe", "lstm", "unet")
_SHORT = {"batch": 1, "seq": 16}
PROGRAMS: dict[str, dict[str, int]] = {
    "distilbert": _SHORT, "gpt_neo_loop": _SHORT, "opt_loop": _SHORT, "bart_summaries": _SHORT, "electra_tags": _SHORT,
    "convnext_images": {"batch": 1, "image": 32}, "resnet_images": {"batch": 1, "image": 32}, "encoder_layers": _SHORT,
    "wide_deep": {"batch": 8}, "gru_tagger": _SHORT}
HELD_OUT: dict[str, dict[str, int]] = {
    "autocast_decoder": _SHORT, "autoencoder": {"batch": 2}, "depthwise": {"batch": 1, "image": 16},
    "lstm_language": _SHORT, "residual_images": {"batch": 1, "image": 16}, "segmenter": {"batch": 1, "image": 32},
    "seq2seq_torch": _SHORT, "temporal_convolutions": _SHORT}
"""Sizes of others' programs: of those that choices were made with, and of those that accuracy is reported of."""
LIBRARIES: dict[str, dict[str, int]] = {
    "timm_resnet": {"batch": 2, "image": 32}, "timm_vit": {"batch": 2, "image": 32},
    "timm_efficientnet": {"batch": 2, "image": 32}, "lightning_fabric": {"batch": 1, "seq": 8},
    "lightning_trainer": {"batch": 4}}
"""Of timm's and Lightning's, which accuracy is reported of too. They need these libraries, and timm torchvision."""
SMALL_MODELS = "small_models"
"""The file of many models of three libraries, each a program by its own name (``--models``)."""
PARALLEL = (*(f"{name}:fsdp2" for name in ("bert", "lstm", "moe", "unet", "resnet50", "deepfm", "ncf")), "bert:ddp",
            "unet:ddp")
"""Workloads and plans whose hooks the models are to know."""


def main() -> None:
    """Build, warm up, and record round by round."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--keep", type=int, default=6, help="rounds kept, those least disturbed")
    parser.add_argument("--workloads", default=",".join(SUITE), help="names, separated by commas")
    parser.add_argument("--programs", default=",".join(PROGRAMS), help="names, separated by commas")
    parser.add_argument("--models", default="", help="rows of foreign_programs/small_models.py, or all of them")
    parser.add_argument("--parallel", default=",".join(PARALLEL), help="workload:plan, separated by commas")
    parser.add_argument("--count-python", action="store_true", help="into captures that are there; time nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    built = {name: _workload(name) for name in _names(options.workloads)}
    built |= {name: _program(name) for name in _names(options.programs)}
    rows = sorted(_file(SMALL_MODELS).MODELS) if options.models == "all" else _names(options.models)
    built |= {name: (_file(SMALL_MODELS).build(name=name), {}) for name in rows}
    parallel = _names(options.parallel)
    world = ExitStack()
    if parallel:
        from tracer.fake_world import fake_world

        world.enter_context(fake_world(2, 0))
        built |= {name.replace(":", "_"): _spread(*name.split(":")) for name in parallel}
    with world:
        if options.count_python:
            _count_python(built, options.output)
            return
        record_rounds(built, options.output, RoundPlan(options.rounds, options.keep), partial(print, flush=True))


def _count_python(programs: dict[str, Program], folder: Path) -> None:
    for name, (step, _) in programs.items():
        for _ in range(FIRST_STEPS):
            step()
        notes = PythonNotes()
        notes.start()
        step()
        notes.stop()
        for path in sorted((folder / name).glob("round*/rank0/graph.foretrace")):
            graph = ExecutionGraph.load(path)
            for sentence in note_python_calls(graph, notes.rows):
                print(f"{path}: {sentence}")
            graph.save(path)
        print(f"{name}: {sum(calls for _, calls in notes.rows):,} calls around {len(notes.rows) - 1:,} operations")


def _spread(name: str, plan: str) -> Program:
    """A step of the suite's workload under a plan on two ranks, and what its captures say of it: nothing, as its ranks
    are none."""
    from tracer.fake_world import parallelize
    from tracer.parallel_plan import ParallelPlan

    workload = parallelize(create(parse(name, ["optimizer=adamw-foreach"], preset="tiny")),
                           ParallelPlan.parse(f"{plan}=2"))
    batches = workload.batches()
    return lambda: workload.step(next(batches)), {}


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _workload(name: str) -> Program:
    """A step of the suite's workload, and what its captures say of it."""
    settings = parse(name, ["optimizer=adamw-foreach"], preset="tiny")
    workload = create(settings)
    batches = workload.batches()
    return (lambda: workload.step(next(batches)),
            {"workload": {"name": name, "settings": as_plain(settings), "split": split(settings)}})


def _program(name: str) -> Program:
    """A step of another's program."""
    return partial(_file(name).build, **{**PROGRAMS, **HELD_OUT, **LIBRARIES}[name])(), {}


@lru_cache
def _file(name: str) -> ModuleType:
    """A file of others' programs."""
    path = Path(__file__).resolve().parents[1] / "benchmarks" / "foreign_programs" / f"{name}.py"
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    return importlib.import_module(name)


if __name__ == "__main__":
    main()
