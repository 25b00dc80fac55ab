"""Steps traced by shapes on a CPU against what they took, by what captures of other programs on that CPU teach.

    python benchmarks/traced_steps.py traces/host-xeon [FOLDER ...] [--foreign traces/host-xeon-held-out]

Folders hold programs with a folder of each round (``traces/record_host.py``). The suite's nine are judged, and those of
``--foreign``, rows of ``foreign_programs/small_models.py`` that need their libraries; all other programs teach: what
the host costs (``kernel_models/host``), and what operations compute (as ``foretrace fit`` of their captures does). Of
the judged ones nothing is known but their code. The truth is the unprofiled step, the median of the rounds. Beside it
stand the same steps with computing priced for the CPU that stands for any.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from host_model import SUITE, print_sum

from graph_predictor.prediction.host_steps import read_rounds
from graph_predictor.request.measured import read_kernels
from graph_predictor.sizes.retrace import trace_again
from graph_predictor.synthesis.baseline import baseline_of
from kernel_models.device import device
from kernel_models.fitting import Options, fit_profile
from kernel_models.host.fitting import fit_host
from kernel_models.host.model import HostModel
from kernel_models.pricing import Models
from tracer.errors import ForetraceError
from tracer.graph import ExecutionGraph
from tracer.job import read_job
from tracer.shape_only.apart import trace_apart

FOREIGN = Path(__file__).parent / "foreign_programs"
BUILDER = "from small_models import build as of_name\n\n\ndef build():\n    return of_name(name={name!r})\n"
"""A program of ``foreign_programs/small_models.py``, as a script that builds it."""
CPU = "cpu"


def main() -> None:
    """Fit to the programs that teach, then print every judged step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recordings", type=Path, nargs="+")
    parser.add_argument("--foreign", type=Path)
    options = parser.parse_args()
    folders = {path.name: path for folder in options.recordings for path in sorted(folder.iterdir()) if path.is_dir()}
    suite = {name: folders[name] for name in SUITE if name in folders}
    foreign = {} if options.foreign is None else {p.name: p for p in sorted(options.foreign.iterdir()) if p.is_dir()}
    teaching = [path for name, path in folders.items() if name not in {*suite, *foreign}]
    law = fit_host([step for folder in options.recordings for name, step in read_rounds(folder).items()
                    if folders[name] in teaching])
    begin = time.process_time()
    samples = read_kernels([str(one) for path in teaching for one in sorted(path.glob("round*"))], spec=device(CPU))
    profile = fit_profile(samples, device(CPU), Options.of_one_machine(refit=True))
    print(f"{len(teaching)} programs teach, of {sum(map(len, samples)):,} times of calls; reading and fitting: "
          f"{time.process_time() - begin:.0f} s of processor time")
    for title, judged in (("suite", suite), ("others", foreign)):
        traced = {name: graph for name, path in judged.items() if (graph := _traced(name, path)) is not None}
        for computing, models in (("taught", profile), ("of any CPU", None)):
            _judged(f"{title}, computing {computing}", ((name, judged[name], graph) for name, graph in traced.items()),
                    law, models)


def _traced(name: str, path: Path) -> ExecutionGraph | None:
    """Trace a recorded program by shapes; ``None``, with a line, where its library is not there."""
    recorded = read_job(min(path.glob("round*"))).graphs[0]
    if recorded.meta.workload:
        return trace_again(recorded, {}, CPU)
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / f"{name}.py"
        script.write_text(f"import sys\n\nsys.path.insert(0, {str(FOREIGN)!r})\n{BUILDER.format(name=name)}")
        try:
            return trace_apart(f"{script}:build", CPU)
        except ForetraceError as error:
            print(f"{name} is left out: {error}")
            return None


def _judged(title: str, cases: Iterable[tuple[str, Path, ExecutionGraph]], law: HostModel, models: Models | None) -> \
        None:
    print(f"\n{title:32} measured  predicted   error  interval    within")
    errors, held = [], []
    for name, path, graph in cases:
        captures = [read_job(one).graphs[0] for one in sorted(path.glob("round*"))]
        truth = float(np.median([np.median(one.meta.unprofiled_step_ns) for one in captures])) / 1e3
        found = baseline_of([graph], host=law, models=models).predict()
        low, high = found.interval_us
        errors.append(found.step_time_us / truth - 1)
        held.append(low <= truth <= high)
        print(f"{name:32}{truth:9,.0f}{found.step_time_us:11,.0f}{errors[-1]:+8.1%}  {low / found.step_time_us:.2f}–"
              f"{high / found.step_time_us:.2f}  {'yes' if held[-1] else 'no'}")
    if errors:
        print_sum(errors, held)


if __name__ == "__main__":
    main()
