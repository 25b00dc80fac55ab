"""The ledger: runs every accuracy benchmark whose data is at hand, keeps the outputs and writes docs/accuracy.md.

    python benchmarks/ledger.py list                             # claims, and what each needs
    python benchmarks/ledger.py run [NAME …] [--most-minutes 5]  # runs them and keeps what they print in docs/ledger/
    python benchmarks/ledger.py write                            # docs/accuracy.md from what is kept
    python benchmarks/ledger.py check                            # does every figure of README and trust.md stand there?

Data: the folder that FORETRACE_DATA names, else `shared/data` beside the checkout. A claim whose data is absent keeps
its last figures. A benchmark that takes this machine for an hour (programs run in turns) is not run unless it is
named; the page says so and gives its command.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KEPT = ROOT / "docs" / "ledger"
PAGE = ROOT / "docs" / "accuracy.md"
CHECKED = (ROOT / "README.md", ROOT / "docs" / "trust.md")
DATA = Path(os.environ.get("FORETRACE_DATA") or ROOT.parent / "shared" / "data")
PACKAGES = ("foretrace", "numpy", "scipy", "scikit-learn", "pandas", "torch")
_FIGURE = re.compile(r"[-+−]?\d+(?:\.\d+)?%")


@dataclass(frozen=True)
class Claim:
    """A benchmark of the ledger.

    Attributes:
        name: file of what it printed, and anchor on the page.
        title: what is claimed of what.
        command: arguments of Python; DATA stands for the data's folder.
        needs: a path below the data's folder; empty if the project has all of it.
        minutes: about how long it takes on two cores; more than an hour is a measurement of this machine.
        peer: the best published figure for comparable work.
    """

    name: str
    title: str
    command: tuple[str, ...]
    needs: str
    minutes: float
    peer: str = ""


CLAIMS = (
    Claim("replay", "Closure: recorded steps replayed, and what-ifs whose answer is known",
          ("benchmarks/replay_accuracy.py", "DATA"), "traces", 2,
          "Lumos 3.3% (replay, ≤ 512 H100); Chakra's own simulation +34%"),
    Claim("traces", "Recorded steps: other steps, other devices, other hosts", ("benchmarks/predict_traces.py", "DATA"),
          "traces", 3, "Lin et al. 2022: 11.9% MAPE (one GPU, measured kernels)"),
    Claim("jobs", "A job of eight H100: one rank, its collectives by models, logged steps",
          ("benchmarks/jobs.py", "DATA"), "traces/nanogpt-8xH100", 2, "Lin et al. 2024: 5.21% geomean (DLRM)"),
    Claim("datasheets", "Device work of recorded traces from data sheets alone",
          ("benchmarks/datasheet_traces.py", "DATA"), "traces", 3),
    Claim("collectives", "Collectives: sizes and ranks that were not fitted", ("benchmarks/collectives.py", "DATA"),
          "collectives", 2, "Lin et al. 2024: all-reduce 5–6.4%, all-to-all 5.3–6.3%"),
    Claim("mixed_backends", "The best backend for each collective", ("benchmarks/mixed_backends.py", "DATA"),
          "collectives", 1, "MCR-DL chooses by measuring each size"),
    Claim("lookups_gpu", "Embedding look-ups of a recorded DLRM", ("benchmarks/dlrm_kernels.py", "DATA"),
          "traces/dlrm-8xV100-2023", 1, "Lin et al. 2024: 4.4–5.6% forward, 3.1–3.6% backward (geomean)"),
    Claim("host", "Host time of programs that were never recorded",
          ("benchmarks/host_model.py", "traces/host", "--held-out", "traces/host-held-out"), "", 2,
          "Lin et al. 2022: shared overheads 10.2%"),
    Claim("host_xeon", "Host time on a second host: programs chosen after the law was are held out",
          ("benchmarks/host_model.py", "traces/host-xeon", "--held-out", "traces/host-xeon-held-out",
           "--only-held-out"), "", 1),
    Claim("traced_epyc", "Steps of the suite traced by shapes, by captures of other programs on that CPU",
          ("benchmarks/traced_steps.py", "traces/host"), "", 2),
    Claim("traced_xeon", "Steps of the suite traced by shapes, on a second CPU",
          ("benchmarks/traced_steps.py", "traces/host-xeon"), "", 2),
    Claim("host_few", "Host time of a host never seen, and by few programs of it", ("benchmarks/host_few.py",), "", 3),
    Claim("profiler", "The profiler's own cost taken out of recordings",
          ("benchmarks/profiler_cost.py", "traces/host", "traces/host-held-out"), "", 2),
    Claim("simumax", "Megatron-Core steps on eight B200", ("benchmarks/simumax.py", "DATA"), "end_to_end", 3,
          "SimuMax 5.4%, with kernels measured on the machine"),
    Claim("large_jobs", "Published steps of 8 to 11,616 H100, B200 and GB200", ("benchmarks/weak_scaling.py", "DATA"),
          "end_to_end", 4),
    Claim("vtrain", "vTrain's published iteration times, A100", ("benchmarks/vtrain.py", "DATA"), "end_to_end", 4,
          "vTrain 8.37% single node, 14.73% multi-node, with layers measured"),
    Claim("nanotron", "An eager framework: Hugging Face's nanotron on 8 to 512 H100, models that fitted nothing",
          ("benchmarks/nanotron.py", "DATA"), "end_to_end", 6),
    Claim("memory", "Peak memory of published training steps", ("benchmarks/llm_memory.py", "DATA", "--rows", "peaks"),
          "end_to_end", 4),
    Claim("plan_intervals", "How often plans' intervals hold", ("benchmarks/plan_intervals.py", "DATA"), "end_to_end",
          5),
    Claim("kernels", "Learned kernels: held-out shapes of published tables", ("benchmarks/kernel_accuracy.py", "DATA"),
          "kernels", 15, "AIConfigurator: products 4.9% median by interpolation"),
    Claim("neusight", "Kernels of GPUs never fitted (NeuSight's protocol)", ("benchmarks/neusight_protocol.py",),
          "kernels", 15, "NeuSight's own errors stand in the table"),
    Claim("inference_kernels", "Kernels of inference", ("benchmarks/inference_kernels.py", "DATA"), "kernels", 3),
    Claim("serving", "Served models: TTFT and TPOT", ("benchmarks/serving.py", "DATA"), "end_to_end", 5),
    Claim("serving_latency", "Served models: single batches, by their parts",
          ("benchmarks/serving.py", "DATA", "--rows", "latency"), "end_to_end", 1),
    Claim("foreign_sizes", "Programs of others at sizes they never ran, on this machine",
          ("benchmarks/foreign_sizes.py", "--held-out", "--rounds", "2", "--offline"), "", 90),
    Claim("gloo", "Steps of several processes on this machine", ("benchmarks/gloo_steps.py", "--keep", "out/gloo"), "",
          90),
    Claim("shardings", "Shardings chosen without running them", ("benchmarks/dlrm_sharding.py",), "", 240,
          "Lin et al. 2024: best sharding found in 17 of 20"),
    Claim("image_models", "700 image models of timm on RTX 3090 and 4090", ("benchmarks/zoo.py", "judge", "CACHE"),
          "end_to_end", 600, "NeuSight per model 0.1–28%"),
)


def at_hand(claim: Claim) -> bool:
    """Return whether a claim's script and data are there."""
    return (ROOT / claim.command[0]).is_file() and (not claim.needs or (DATA / claim.needs).exists())


def run(claim: Claim) -> bool:
    """Run a claim and keep what it prints; whether it ended well."""
    command = [str(DATA) if part == "DATA" else part for part in claim.command]
    begin = time.perf_counter()
    ran = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False)
    if ran.returncode:
        print(f"{claim.name}: ended with {ran.returncode}: {ran.stderr[-500:]}")
        return False
    KEPT.mkdir(exist_ok=True)
    head = {"date": datetime.date.today().isoformat(), "commit": _commit(),
            "seconds": round(time.perf_counter() - begin), "python": sys.version.split()[0], "versions": _versions()}
    text = ran.stdout.replace(str(DATA), "DATA").replace(f"{ROOT}/", "")
    (KEPT / f"{claim.name}.txt").write_text(json.dumps(head) + "\n" + text, encoding="utf-8")
    return True


def write() -> None:
    """Write the page of what is kept."""
    parts = [_HEAD]
    for claim in CLAIMS:
        kept = KEPT / f"{claim.name}.txt"
        shown = " ".join(("python", *claim.command))
        parts.append(f"## {claim.title}\n")
        if not kept.is_file():
            parts.append(f"Not run by the ledger (some {claim.minutes:g} minutes of this machine): `{shown}`\n")
            continue
        head, _, text = kept.read_text(encoding="utf-8").partition("\n")
        facts = json.loads(head)
        peer = f" Published by others: {claim.peer}." if claim.peer else ""
        parts.append(f"[Every case](ledger/{kept.name}). Command: `{shown}`. Run on {facts['date']} at commit "
                     f"{facts['commit']} in {facts['seconds']:,} s.{peer}\n")
        parts.append(f"```text\n{_summary(text)}\n```\n")
    PAGE.write_text("\n".join(parts), encoding="utf-8")


def _summary(text: str) -> str:
    """Return the first lines of an output that state a mean error; of one without, its last lines."""
    lines = list(filter(str.strip, text.splitlines()))
    return "\n".join([line for line in lines if _MEAN.search(line)][:SHOWN] or lines[-SHOWN:])


SHOWN = 8
"""Lines of an output that the page shows."""
_MEAN = re.compile(r"MAPE +\d")
_HEAD = """# How accurate are the predictions?

Each section is one benchmark, with its command and the first lines of its last output that state a mean error. The link
leads to the whole output: every case, and the versions of all packages. `make ledger` runs the benchmarks and writes
this page.

Figures are of held-out cases, split before looking, unless an output says otherwise. MAPE is the mean of absolute
errors, bias the mean of signed errors. *Published by others* is the best figure for comparable work, on the data of its
authors. The docstring of each script names its data: traces, tables of kernels and collectives, and step times that
others published.
"""


def unknown_figures() -> Iterator[tuple[Path, str]]:
    """Percentages of the checked pages that no benchmark of the ledger printed, and that no console block shows."""
    known = {_plain(figure) for kept in KEPT.glob("*.txt") for figure in _FIGURE.findall(kept.read_text("utf-8"))}
    for page in CHECKED:
        text = page.read_text(encoding="utf-8")
        prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
        for figure in _FIGURE.findall(prose):
            if _plain(figure) not in known:
                yield page, figure


ASKED = frozenset({"80%", "100%", "0%"})
"""Not figures of accuracy: what an interval holds, and wholes."""


def _plain(figure: str) -> str:
    return figure.replace("−", "-").lstrip("+")


def _commit() -> str:
    ran = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return ran.stdout.strip() or "unknown"


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["list", "run", "write", "check"])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--most-minutes", type=float, default=20)
    options = parser.parse_args()
    chosen = [claim for claim in CLAIMS if claim.name in options.names or (
        not options.names and claim.minutes <= options.most_minutes)]
    if options.what == "list":
        for claim in CLAIMS:
            there = "at hand" if at_hand(claim) else "no data"
            print(f"{claim.name:18} {claim.minutes:5g} min  {there:8} {claim.title}")
    elif options.what == "run":
        failed = 0
        for claim in chosen:
            if at_hand(claim):
                print(f"{claim.name} …", flush=True)
                failed += not run(claim)
        write()
        sys.exit(1 if failed else 0)
    elif options.what == "write":
        write()
    else:
        found = [(page, figure) for page, figure in unknown_figures() if figure not in ASKED]
        for page, figure in found:
            print(f"{page.relative_to(ROOT)}: {figure} stands in no output of the ledger")
        sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
