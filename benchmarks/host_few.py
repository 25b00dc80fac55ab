"""Host time of programs of one host, told by a few others of it and by what is known of another host.

    python benchmarks/host_few.py [OTHER] [OWN ...] [--draws 6]

``OTHER`` is a folder of recordings (``traces/record_host.py``) of one host, whose programs make the law; ``OWN`` are of
another host (default: the EPYC's and the Xeon's in ``traces``). Of these, so many programs are drawn at random, seeded;
all others are told by them alone, and by them with the law (``kernel_models/host/fitting.py``). With none of its
own, a host is what the law says: what a host never seen is off by.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from graph_predictor.prediction.host_steps import read_rounds
from kernel_models.host.events import HostStep
from kernel_models.host.fitting import fit_few, fit_host
from kernel_models.host.model import HostModel

TRACES = Path(__file__).resolve().parents[1] / "traces"
COUNTS = (1, 2, 3, 5, 10, 20)


def main() -> None:
    """Print each number of programs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, nargs="?", default=TRACES / "host")
    parser.add_argument("own", type=Path, nargs="*", default=[TRACES / "host-xeon", TRACES / "host-xeon-held-out"])
    parser.add_argument("--draws", type=int, default=6, help="of each number of programs")
    options = parser.parse_args()
    law = fit_host(list(read_rounds(options.other).values()), "others")
    steps = {name: step for folder in options.own for name, step in read_rounds(folder).items()}
    missed = np.array([_missed(law, step) for step in steps.values()])
    print(f"{len(steps)} programs, told by the law of {law.programs} on the other host:")
    _judged("no program", missed, np.full(len(missed), np.inf))
    _judged("times one factor", missed - missed.mean(), np.full(len(missed), np.inf))
    print(f"standard deviation of logarithms: {missed.std(ddof=1):.3f}; factor {np.exp(missed.mean()):.2f}")
    random = np.random.default_rng(0)
    for count in COUNTS:
        draws = [random.choice(sorted(steps), count, replace=False).tolist() for _ in range(options.draws)]
        _of("alone", count, draws, steps, fit_host)
        _of("with the law", count, draws, steps, lambda mine: fit_few(mine, law=law))


def _of(title: str, count: int, draws: Sequence[Sequence[str]], steps: dict[str, HostStep],
        fit: Callable[[Sequence[HostStep]], HostModel]) -> None:
    missed, spread = [], []
    for drawn in draws:
        model = fit([steps[name] for name in drawn])
        others = [_missed(model, step) for name, step in steps.items() if name not in drawn]
        missed += others
        spread += [model.suited(has_calls=True).spread] * len(others)
    _judged(f"{count} {title}", np.array(missed), np.array(spread))


def _missed(model: HostModel, step: HostStep) -> float:
    """Return the logarithm of the measured time over the told one."""
    return float(np.log(step.host_ns / sum(float(part.sum()) for part in model.estimate(step))))


def _judged(title: str, missed: np.ndarray, spread: np.ndarray) -> None:
    errors = np.expm1(-missed)
    size = np.abs(errors)
    held = "" if np.isinf(spread).all() else f"; in the 80% interval: {(np.abs(missed) <= spread).mean():.0%}"
    print(f"{title:18} MAPE {size.mean():.1%}, median {np.median(size):.1%}, bias {errors.mean():+.1%}, p90 "
          f"{np.quantile(size, 0.9):.1%}, worst {size.max():.1%}; within 10%: {(size <= 0.1).mean():.0%}{held}")


if __name__ == "__main__":
    main()
