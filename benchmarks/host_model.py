"""Host time of programs that were never recorded, by a model of others on the same host.

    python benchmarks/host_model.py RECORDINGS [--held-out FOLDER] [--only-held-out]

``RECORDINGS`` is a folder of programs with a folder of each round (``traces/record_host.py``). Each program is left
out in turn, predicted by the others, and beside it stands the host time that was measured: the median of its rounds.
Programs of ``--held-out`` are predicted by all of ``RECORDINGS``; nothing was chosen with them. Where timm's and
Lightning's are among them, the nine and the ten of libraries are left out in turn of these 19 too, and all programs of
all. Whole steps that such models tell are in ``benchmarks/traced_steps.py``.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np

from graph_predictor.prediction.host_steps import read_rounds
from kernel_models.host.fitting import ToldHost, fit_host, left_out, told
from kernel_models.host.model import read_host

SUITE = ("dlrm", "resnet50", "bert", "llama", "gpt2", "vit", "moe", "lstm", "unet")
OF_LIBRARIES = ("distilbert", "gpt_neo_loop", "opt_loop", "bart_summaries", "electra_tags", "timm_resnet", "timm_vit",
                "timm_efficientnet", "lightning_fabric", "lightning_trainer")
"""Programs of transformers, timm and Lightning."""


def main() -> None:
    """Print every case and what they come to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recordings", type=Path)
    parser.add_argument("--held-out", type=Path)
    parser.add_argument("--host", type=Path, help="a file of foretrace calibrate --host, to be held against them")
    parser.add_argument("--only-held-out", action="store_true", help="leave none of RECORDINGS out: minutes less")
    options = parser.parse_args()
    steps = read_rounds(options.recordings)
    begin = time.process_time()
    whole = fit_host(list(steps.values()))
    used = whole.suited(all(step.calls is not None for step in steps.values()))
    print(f"Fit of {len(steps)} programs: {time.process_time() - begin:.2f} s of processor time; offset "
          f"{used.offset:+.2f}; interval ×/÷ "
          f"{np.exp(used.spread):.2f}")
    if not options.only_held_out:
        _table("left out in turn", left_out(steps))
    held_out = {} if options.held_out is None else read_rounds(options.held_out)
    if held_out:
        _table("held out", [told(name, step, whole) for name, step in held_out.items()])
    every = {**steps, **held_out}
    if every.keys() >= {*SUITE, *OF_LIBRARIES} and not options.only_held_out:
        _table("suite and libraries", left_out({name: every[name] for name in (*SUITE, *OF_LIBRARIES)}))
        _table("all, left out in turn", left_out(every))
    if options.host is not None:
        calibrated = read_host(options.host)
        for title, found in (("by the host's file", steps), ("held out, by the file", held_out)):
            if found:
                _table(title, [told(name, step, calibrated) for name, step in found.items()])


def _table(title: str, cases: list[ToldHost]) -> None:
    print(f"\n{title:24} measured  predicted   error  known  within")
    for case in cases:
        print(f"{case.name:24}{case.measured_ns / 1e3:9,.0f}{case.told_ns / 1e3:11,.0f}{case.error:+8.1%}"
              f"{case.known:7.0%}  {'yes' if case.within else 'no'}")
    print_sum([case.error for case in cases], [case.within for case in cases])


def print_sum(errors: list[float], held: list[bool]) -> None:
    """Print what relative errors, and whether each truth lay in its interval, come to."""
    size = np.abs(errors)
    print(f"MAPE {size.mean():.1%}, median {np.median(size):.1%}, bias {np.mean(errors):+.1%}, p90 "
          f"{np.quantile(size, 0.9):.1%}, worst {size.max():.1%}; within 10%: {(size <= 0.1).sum()} of {len(size)}; in "
          f"the 80% interval: {np.mean(held):.0%}")


if __name__ == "__main__":
    main()
