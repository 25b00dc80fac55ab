"""Shapes: what sizes that no kernel likes cost, predicted against measured sweeps, and known examples of it.

    python benchmarks/shape_advice.py [DATA]

DATA (default: the environment's FORETRACE_DATA, else the shared data beside the checkout) is a folder with
`kernels/gemm_alignment_fp16.parquet`: fp16 products on V100, A100 and MI250X, swept through one dimension (EleutherAI
cookbook, after Anthony et al., "The Case for Co-Designing Model Architectures with Hardware", 2024).

Fitted: `words.NARROW` and `SINGLE` to the A100's sweep through the contraction (`vocab_h_sweep`), `shapes.REPEATED` and
`SHARE` to pairs of neighbours of that sweep and of all of the V100. Everything else is judged: the order of a sweep's
sizes by rate (Spearman), and pairs of neighbours (sizes within 5%), whose gain is judged by its sign and interval.
"""

from __future__ import annotations

import argparse
import os
from itertools import combinations
from pathlib import Path

import numpy as np
import pandas as pd
from zoo_parts.cases import ALIGNMENT_GPUS, alignment_cases

from kernel_models.device import device
from kernel_models.heuristics.products import NARROW, SINGLE
from kernel_models.pricing import price
from planner.parallel.corrections import Z80
from planner.parallel.layer_costs import LayerCosts
from planner.parallel.shapes import REPEATED, SHARE, advise
from tracer.parallel_plan import ParallelPlan
from tracer.shape_only.transformer import TransformerShape

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(os.environ.get("FORETRACE_DATA", ROOT.parent / "shared" / "data"))
FITTED_WORDS = ("a100", "vocab_h_sweep")
NEAR = 0.05
"""Sizes of a pair differ by so much at most."""
TOLD = 0.05
"""Pairs that differ by more than this, measured, are judged by their sign."""


def swept(data: Path) -> pd.DataFrame:
    """The rows with their swept size, measured and predicted µs."""
    table = pd.read_parquet(data / "kernels" / "gemm_alignment_fp16.parquet")
    calls = [call for _, call, *_ in alignment_cases(data)]
    table["us"] = 2.0 * table.batch * table["first"] * table.second * table.third / table.tflops / 1e6
    table["flops"] = [call.flops for call in calls]
    table["predicted"] = 0.0
    for gpu, rows in table.groupby("gpu"):
        priced = price([calls[i] for i in rows.index], device(ALIGNMENT_GPUS[str(gpu)]))
        table.loc[rows.index, "predicted"] = priced.times_us
    size = {"vocab_v_sweep": "second"}
    table["size"] = [row[size.get(row["sweep"], "third")] for _, row in table.iterrows()]
    table["fitted"] = [row.gpu == "v100" or (row.gpu, row.sweep) == FITTED_WORDS for row in table.itertuples()]
    return table


def words_fit(table: pd.DataFrame) -> tuple[float, float]:
    """Times that rows of no whole 16 and 4 bytes take as long as whole ones: of medians at equal work."""
    rows = table[(table.gpu == FITTED_WORDS[0]) & (table.sweep == FITTED_WORDS[1])]
    rate, size = rows.tflops, rows["size"]
    whole = rate[size % 8 == 0].median()
    return whole / rate[(size % 8 != 0) & (size % 2 == 0)].median(), whole / rate[size % 2 != 0].median()


def pairs(table: pd.DataFrame) -> pd.DataFrame:
    """Neighbours of a sweep: logarithms of what the second takes longer for its work, measured and predicted."""
    found = []
    for (gpu, sweep, _), rows in table.groupby(["gpu", "sweep", "batch"]):
        rows = rows.sort_values("size")
        measured, predicted = np.log(rows.us / rows.flops).to_numpy(), np.log(rows.predicted / rows.flops).to_numpy()
        size = rows["size"].to_numpy()
        found += [(gpu, sweep, bool(rows.fitted.iloc[0]), size[i], size[j], measured[j] - measured[i],
                   predicted[j] - predicted[i])
                  for i, j in combinations(range(len(rows)), 2) if 0 < size[j] / size[i] - 1 <= NEAR]
    return pd.DataFrame(found, columns=["gpu", "sweep", "fitted", "from", "to", "measured", "predicted"])


def spread_fit(found: pd.DataFrame) -> tuple[float, float]:
    """``REPEATED`` and ``SHARE`` of largest likelihood, each sweep counting as much."""
    weight = 1.0 / found.groupby(["gpu", "sweep"])["measured"].transform("size")
    best = (np.inf, 0.0, 0.0)
    for repeated in np.arange(0.01, 0.2001, 0.005):
        for share in np.arange(0.0, 1.5, 0.05):
            variance = repeated**2 + (share * found.predicted)**2
            cost = float(np.sum(weight * (np.log(variance) + (found.measured - found.predicted)**2 / variance)))
            best = min(best, (cost, float(repeated), float(share)))
    return best[1], best[2]


def judged(found: pd.DataFrame) -> str:
    """Pairs: how many, by how much they differ, the error, signs, intervals."""
    spread = Z80 * np.sqrt(REPEATED**2 + (SHARE * found.predicted)**2)
    error = found.predicted - found.measured
    told = found[found.measured.abs() > TOLD]
    sign = (np.sign(told.predicted) == np.sign(told.measured)).mean() if len(told) else np.nan
    return (f"{len(found):>6}{100 * found.measured.abs().mean():>10.1f}{100 * error.abs().mean():>8.1f}"
            f"{len(told):>7}{100 * sign:>8.1f}{100 * (error.abs() <= spread).mean():>9.1f}")


def gpt(layers: int, hidden: int, heads: int, seq: int, vocab: int = 50_304, **more: object) -> TransformerShape:
    values = {"kv_heads": heads, "ffn": 4 * hidden, "dtype": "fp16", **more}
    return TransformerShape(layers=layers, hidden=hidden, heads=heads, vocab=vocab, seq=seq, **values)  # type: ignore[arg-type]


EXAMPLES = (
    ("GPT-3 2.7B, 32 heads of 80 → 40 of 64", gpt(32, 2560, 32, 2048), 4, "heads", "40 of 64", "quicker"),
    ("GPT-3 2.7B, 32 heads of 80 → 20 of 128", gpt(32, 2560, 32, 2048), 4, "heads", "20 of 128", "quicker"),
    ("the same, attention not fused → 40 of 64", gpt(32, 2560, 32, 2048, flash=False), 4, "heads", "40 of 64",
     "quicker"),
    ("the same, attention not fused → 20 of 128", gpt(32, 2560, 32, 2048, flash=False), 4, "heads", "20 of 128",
     "quicker"),
    ("GPT-3 2.7B, 32 heads of 80 → 64 of 40", gpt(32, 2560, 32, 2048), 4, "heads", "64 of 40", "slower"),
    ("GPT-2 124M (nanoGPT), vocabulary 50,257 → 50,304", gpt(12, 768, 12, 1024, 50_257, bias=False, tied=True,
                                                         dtype="bf16"), 12, "vocab", "50,304", "quicker, about 25%"),
    ("Llama-like 4096, inner width 8h/3 = 10,922 → 11,008", gpt(
        32, 4096, 32, 2048, 32_000, ffn=10_922, gated=True, rms=True, rotary=True, bias=False), 4, "ffn", "11,008",
     "quicker"),
    ("the same → 10,880", gpt(
        32, 4096, 32, 2048, 32_000, ffn=10_922, gated=True, rms=True, rotary=True, bias=False), 4, "ffn", "10,880",
     "quicker"),
)
"""Known examples: Anthony et al. (2024) on A100; nanoGPT's step by its author (A. Karpathy, February 2023)."""


def examples(name: str) -> None:
    pieces = LayerCosts(device(name))
    print(f"\nknown examples on {name} (GPU time of a token, no collectives)")
    print(f"{'change':<58}{'gain %':>8}{'80% between':>18}  published")
    for what, shape, microbatch, setting, value, published in EXAMPLES:
        report = advise(shape, ParallelPlan(microbatch=microbatch, microbatches=1), pieces)
        one = next(each for each in report.advice if (each.change.setting, each.change.value) == (setting, value))
        print(f"{what:<58}{100 * one.gain:>8.1f}{100 * one.low:>9.1f}{100 * one.high:>9.1f}  {published}; {one.why()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", type=Path, default=DATA)
    table = swept(parser.parse_args().data)
    narrow, single = words_fit(table)
    print(f"rows of no whole 16 bytes take {narrow:.2f} times as long, of no whole 4 {single:.2f} (shipped "
          f"{NARROW}, {SINGLE})")
    print(f"\n{'sweep':<26}{'rows':>6}{'Spearman':>10}  of rates, predicted and measured")
    for (gpu, sweep), rows in table.groupby(["gpu", "sweep"]):
        order = (rows.flops / rows.predicted).corr(rows.tflops, method="spearman")
        print(f"{gpu + ' ' + sweep:<26}{len(rows):>6}{order:>10.2f}  {'fitted' if rows.fitted.all() else 'judged'}")
    found = pairs(table)
    repeated, share = spread_fit(found[found.fitted])
    print(f"\nneighbours, fitted: REPEATED {repeated:.3f}, SHARE {share:.2f} (shipped {REPEATED}, {SHARE})")
    print(f"{'pairs, %':<36}{'pairs':>6}{'differ by':>10}{'error':>8}{'>5%':>7}{'sign ok':>8}{'in 80%':>9}")
    for (gpu, sweep), rows in found.groupby(["gpu", "sweep"]):
        print(f"{gpu + ' ' + sweep + (' (fitted)' if rows.fitted.all() else ''):<36}{judged(rows)}")
    print(f"{'all that are judged':<36}{judged(found[~found.fitted])}")
    examples("a100-sxm-40g")


if __name__ == "__main__":
    main()
