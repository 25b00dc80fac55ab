"""Programs of other people at sizes they never ran: captured, predicted by three routes, then run.

    python benchmarks/foreign_sizes.py [--held-out] [--only NAME,NAME] [--keep DIR] [--rounds N] [--each]
                                       [--offline] [--threads N] [--profile FILE]

A program is a script with a command line for its sizes, and a function ``build`` that makes its step. In every round
the script is captured once at its own sizes and once at a second size of each kind, as ``foretrace capture`` does it;
what it is asked for is its step at four times the batch, at two and a half times the length, and of some programs at
two and a half to four times a third size (labels, candidates, a width), by three routes: traced again (``--code``), the
nearer of two captures scaled (``--also``), the first one scaled. The script is also run at its own and at the new sizes
in turns of a few steps (``foreign_turns``): how many times as long a step takes there, × the capture's step with
nothing watching, is the truth, so that the machine's noise is in both. Others on a machine only ever make a step
slower: of several rounds the quickest capture of each kind counts, and the median ratio of all turns. With ``--each``
every round is a case of its own.

``TUNING`` was used for every choice that was made. ``HELD_OUT`` is of programs that nothing was tuned on, and is what
accuracy is reported of, 29 programs with 59 sizes: ten of ``tests/foreign/programs``, whose results were seen before
the last choices; six more, which were named after these choices, before any of their results had been looked at; and
thirteen of other kinds, which were named with their sizes before anything was predicted of them.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from foreign_turns import ratios

from graph_predictor.request.study import Configuration, Study
from kernel_models.profile import DeviceProfile, load_profile
from tracer.capture_layout import read_context
from tracer.errors import ForetraceError
from tracer.job import read_job

ROOT = Path(__file__).resolve().parents[1]
COMMAND = "from foretrace.commands import main; main()"
CAPTURE = ("--timed", "10", "--steps", "3", "--form", "foretrace")
STEPS = 60
TURNING_STEPS = 150
"""Steps that a script is asked for where it takes turns, more than these need."""
TURNS_FILE = "turns.json"
ROUTES = ("traced again", "nearer capture", "one capture")


@dataclass(frozen=True)
class Plan:
    """One program: its script, the sizes it is captured at, and of each size the second captured and the one asked."""

    script: str
    base: dict[str, int]
    asked: dict[str, tuple[int, int]]

    @property
    def name(self) -> str:
        return Path(self.script).stem


def _program(name: str, base: dict[str, int], **asked: tuple[int, int]) -> Plan:
    return Plan(f"benchmarks/foreign_programs/{name}.py", base, asked)


def _of_tests(name: str, base: dict[str, int], **asked: tuple[int, int]) -> Plan:
    return Plan(f"tests/foreign/programs/{name}.py", base, asked)


TUNING = (
    _program("distilbert", {"batch": 4, "seq": 48}, batch=(8, 16), seq=(72, 120)),
    _program("opt_loop", {"batch": 3, "seq": 56}, batch=(6, 12), seq=(84, 140)),
    _program("encoder_layers", {"batch": 6, "seq": 40}, batch=(12, 24), seq=(60, 100)),
    _program("lstm_language", {"batch": 6, "seq": 24}, batch=(12, 24), seq=(36, 60)),
    _program("residual_images", {"batch": 4, "image": 48}, batch=(8, 16), image=(72, 120)),
    _program("segmenter", {"batch": 2, "image": 48}, batch=(4, 8), image=(72, 120)),
    _program("wide_deep", {"batch": 192}, batch=(384, 768)),
    _program("temporal_convolutions", {"batch": 8, "seq": 64}, batch=(16, 32), seq=(96, 160)),
    _program("autoencoder", {"batch": 64}, batch=(128, 256)),
    _program("depthwise", {"batch": 4, "image": 32}, batch=(8, 16), image=(48, 80)),
    _program("gru_tagger", {"batch": 6, "seq": 28}, batch=(12, 24), seq=(42, 70)),
    _program("autocast_decoder", {"batch": 3, "seq": 40}, batch=(6, 12), seq=(60, 100)),
    _program("truncated_lstm", {"batch": 32, "seq": 20}, batch=(16, 8)),
)
HELD_OUT = (
    _of_tests("bert_trainer", {"batch": 4, "seq": 48}, batch=(8, 16), seq=(72, 120)),
    _of_tests("gpt2_loop", {"batch": 4, "seq": 64}, batch=(8, 16), seq=(96, 160)),
    _of_tests("vit_images", {"batch": 4, "image": 64}, batch=(8, 16), image=(96, 160)),
    _of_tests("cnn_workers", {"batch": 16}, batch=(32, 64)),
    _of_tests("gru_forecast", {"batch": 8, "seq": 32}, batch=(16, 32), seq=(48, 80)),
    _of_tests("embedding_ranker", {"batch": 128}, batch=(256, 512)),
    _of_tests("t5_translation", {"batch": 4, "seq": 32}, batch=(8, 16), seq=(48, 80)),
    _of_tests("timm_images", {"batch": 4, "image": 64}, batch=(8, 16), image=(96, 160)),
    _of_tests("mixer_accumulation", {"batch": 4}, batch=(8, 16)),
    _of_tests("llama_accumulation", {"batch": 2, "seq": 48}, batch=(4, 8), seq=(72, 120)),
    _program("electra_tags", {"batch": 4, "seq": 44}, batch=(8, 16), seq=(66, 110)),
    _program("bart_summaries", {"batch": 3, "seq": 52}, batch=(6, 12), seq=(78, 130)),
    _program("gpt_neo_loop", {"batch": 5, "seq": 36}, batch=(10, 20), seq=(54, 90)),
    _program("convnext_images", {"batch": 3, "image": 56}, batch=(6, 12), image=(84, 140)),
    _program("resnet_images", {"batch": 4, "image": 56}, batch=(8, 16), image=(84, 140)),
    _program("seq2seq_torch", {"batch": 5, "seq": 38}, batch=(10, 20), seq=(57, 95)),
    _program("whisper_transcripts", {"batch": 3, "frames": 120, "labels": 14}, batch=(6, 12), frames=(180, 300),
             labels=(21, 35)),
    _program("clip_pairs", {"batch": 5, "image": 48, "seq": 18}, batch=(10, 20), image=(72, 120), seq=(27, 45)),
    _program("diffusion_unet", {"batch": 2, "image": 32}, batch=(4, 8), image=(48, 80)),
    _program("graph_attention", {"batch": 14, "nodes": 34}, batch=(28, 56), nodes=(51, 85)),
    _program("conformer_ctc", {"batch": 3, "frames": 100, "width": 88}, batch=(6, 12), frames=(150, 250),
             width=(132, 220)),
    _program("lora_decoder", {"batch": 3, "seq": 46, "rank": 10}, batch=(6, 12), seq=(69, 115), rank=(20, 40)),
    _program("distilled_images", {"batch": 4, "image": 44}, batch=(8, 16), image=(66, 110)),
    _program("two_towers", {"batch": 96, "candidates": 250}, batch=(192, 384), candidates=(500, 1000)),
    _program("state_space", {"batch": 5, "seq": 26}, batch=(10, 20), seq=(39, 65)),
    _program("point_clouds", {"batch": 4, "points": 60}, batch=(8, 16), points=(90, 150)),
    _program("vocoder", {"batch": 2, "frames": 18}, batch=(4, 8), frames=(27, 45)),
    _program("physics_informed", {"batch": 130, "boundary": 50}, batch=(260, 520), boundary=(100, 200)),
    _program("perceiver_recipe", {"batch": 5, "seq": 66}, batch=(10, 20), seq=(99, 165)),
)


@dataclass(frozen=True)
class Case:
    """One prediction and its truth, ms; ``refused`` says why there is none."""

    program: str
    size: str
    route: str
    rounds: str
    truth: float
    predicted: float = float("nan")
    low: float = float("nan")
    high: float = float("nan")
    refused: str = ""

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted / self.truth - 1

    @property
    def covered(self) -> bool:
        """Whether the truth is in the 80% interval."""
        return self.low <= self.truth <= self.high


def label(sizes: dict[str, int]) -> str:
    """Sizes as a part of a file's name."""
    return "-".join(f"{name}{size}" for name, size in sizes.items())


def words(sizes: dict[str, int], steps: int) -> list[str]:
    """Sizes and the number of steps as a program's options."""
    return [word for name, size in sizes.items() for word in (f"--{name}", str(size))] + ["--steps", str(steps)]


def run(plan: Plan, sizes: dict[str, int], out: Path, threads: int) -> None:
    """Capture the program at some sizes in a process of its own, if it is not there yet."""
    if out.exists():
        return
    part = out.with_name(f"part of {out.name}")  # what a run that was stopped left is no capture
    shutil.rmtree(part, ignore_errors=True)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads)}
    subprocess.run([sys.executable, "-c", COMMAND, "capture", *CAPTURE, "--out", str(part), str(ROOT / plan.script),
                    "--", *words(sizes, STEPS)], check=True, capture_output=True, text=True, env=environment)
    part.rename(out)


def places(plan: Plan, folder: Path, number: int) -> Iterator[tuple[Path, dict[str, int]]]:
    """Every capture of a round: where it lies, and its sizes."""
    at = folder / f"{plan.name}-round{number}"
    yield at / label(plan.base), plan.base
    for name, (second, _) in plan.asked.items():
        yield at / label({**plan.base, name: second}), {**plan.base, name: second}


def measure(plan: Plan, folder: Path, number: int, threads: int) -> None:
    """Run everything a round needs."""
    for place, sizes in places(plan, folder, number):
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            run(plan, sizes, place, threads)
        except subprocess.CalledProcessError as error:
            print(f"{plan.name} at {sizes} failed: {(error.stderr.strip().splitlines() or ['?'])[-1]}", file=sys.stderr)
            return
    turns = folder / f"{plan.name}-round{number}" / TURNS_FILE
    if not turns.exists():
        sizes = [plan.base, *({**plan.base, name: asked} for name, (_, asked) in plan.asked.items())]
        found = ratios(ROOT / plan.script, [words(one, TURNING_STEPS) for one in sizes], threads=threads)
        turns.write_text(json.dumps(dict(zip(plan.asked, found, strict=True))))


def grown(plan: Plan, folder: Path, numbers: list[int], name: str) -> float:
    """How many times as long a step takes at the size asked for."""
    return float(np.median(np.concatenate([
        json.loads((folder / f"{plan.name}-round{number}" / TURNS_FILE).read_text())[name] for number in numbers])))


def step_ms(capture: Path) -> float:
    """Median step of a capture with nothing watching, ms."""
    return float(np.median(read_context(capture / "rank0")["unprofiled_step_ns"])) / 1e6


def quickest(plan: Plan, folder: Path, numbers: list[int], name: str) -> Path:
    """Of several rounds the run that was disturbed least: the one with the shortest median step."""
    return min((folder / f"{plan.name}-round{number}" / name for number in numbers), key=step_ms)


def configurations(plan: Plan, other: Path, name: str) -> dict[str, Configuration]:
    """What each route is asked; ``other`` is the second capture."""
    second, asked = plan.asked[name]
    change = f"{name}={plan.base[name]}:{asked}"
    return {
        ROUTES[0]: Configuration(sizes=(f"{name}={asked}",), code=f"{ROOT / plan.script}:build"),
        ROUTES[1]: Configuration(sizes=(change,), also=(f"{other}:{name}={second}",)),
        ROUTES[2]: Configuration(sizes=(change,))}


def cases(plan: Plan, folder: Path, numbers: list[int], profiles: list[DeviceProfile]) -> Iterator[Case]:
    """Predictions from a round, or from the quickest of several, each with its truth."""
    captured = quickest(plan, folder, numbers, label(plan.base))
    study = Study(read_job(captured), profiles=profiles)
    for name, (second, asked) in plan.asked.items():
        truth = step_ms(captured) * grown(plan, folder, numbers, name)
        other = quickest(plan, folder, numbers, label({**plan.base, name: second}))
        for route, configuration in configurations(plan, other, name).items():
            what = (plan.name, f"{name}={asked}", route, "+".join(map(str, numbers)), truth)
            try:
                found = study.predict(configuration)
            except ForetraceError as error:
                yield Case(*what, refused=str(error))
                continue
            yield Case(*what, found.step_time_us / 1e3, found.interval_us[0] / 1e3, found.interval_us[1] / 1e3)


def summary(title: str, found: list[Case]) -> str:
    """MAPE, median, bias, p90, max and coverage in one line."""
    refused = sum(bool(case.refused) for case in found)
    known = [case for case in found if not case.refused]
    said = f"{title:<24} {len(found):>4} {refused:>8}"
    if not known:
        return said
    error = np.array([case.error for case in known])
    size = np.abs(error)
    held = float(np.mean([case.covered for case in known]))
    width = float(np.median([np.log(case.high / case.low) / 2 for case in known]))
    return (f"{said} {size.mean():>7.1%} {np.median(size):>7.1%} {error.mean():>+7.1%} {np.quantile(size, 0.9):>7.1%} "
            f"{size.max():>7.1%} {held:>7.0%} {width:>7.1%}")


def main() -> None:
    """Measure, predict and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--held-out", action="store_true", help="the programs nothing was tuned on")
    parser.add_argument("--only", metavar="NAME,NAME", help="these programs alone")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep captures here, and use those that are there")
    parser.add_argument("--rounds", type=int, default=1, help="times everything is measured, in turn")
    parser.add_argument("--offline", action="store_true", help="measure nothing, predict from what --keep has")
    parser.add_argument("--measure", action="store_true", help="measure alone, predict nothing")
    parser.add_argument("--each", action="store_true", help="every round by itself, rather than the quickest runs")
    parser.add_argument("--threads", type=int, default=1, help="threads of the programs")
    parser.add_argument("--profile", metavar="FILE", help="fitted models of this CPU (foretrace calibrate)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every case here too")
    options = parser.parse_args()
    plans = [plan for plan in (HELD_OUT if options.held_out else TUNING)
             if options.only is None or plan.name in options.only.split(",")]
    profiles = [] if options.profile is None else [load_profile(options.profile)]
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        if not options.offline:
            for number in range(options.rounds):
                for plan in plans:
                    measure(plan, folder, number, options.threads)
        if options.measure:
            return
        found = []
        print(f"{'program':<22} {'asked':<12} {'route':<15} {'rounds':>6} {'truth ms':>9} {'predicted':>9} "
              f"{'80% interval':>20} {'error':>7}")
        for plan in plans:
            numbers = [number for number in range(options.rounds)
                       if (folder / f"{plan.name}-round{number}" / TURNS_FILE).exists()]
            for one in ([[number] for number in numbers] if options.each else [numbers] if numbers else []):
                for case in cases(plan, folder, one, profiles):
                    found.append(case)
                    print(line(case), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps([vars(case) for case in found], indent=1))
    print(f"\n{'':<24} {'cases':>4} {'refused':>8} {'MAPE':>7} {'median':>7} {'bias':>7} {'p90':>7} {'max':>7} "
          f"{'inside':>7} {'± width':>7}")
    for route in ROUTES:
        mine = [case for case in found if case.route == route]
        print(summary(route, mine))
        print(summary("  batch", [case for case in mine if case.size.startswith("batch")]))
        print(summary("  other sizes", [case for case in mine if not case.size.startswith("batch")]))


def line(case: Case) -> str:
    """One case in a line of the table."""
    said = f" refused: {case.refused[:110]}" if case.refused else (
        f"{case.predicted:>9.2f} {f'{case.low:.2f} to {case.high:.2f}':>20} {case.error:>+7.1%}"
        + ("" if case.covered else "  outside"))
    return f"{case.program:<22} {case.size:<12} {case.route:<15} {case.rounds:>6} {case.truth:>9.2f} {said}"


if __name__ == "__main__":
    main()
