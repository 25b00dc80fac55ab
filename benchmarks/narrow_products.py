"""Products in narrow types on this processor, over those in fp32: what a unit gains or emulation costs.

    OMP_NUM_THREADS=1 python benchmarks/narrow_products.py

Prints the units that the processor lists and, for three sizes and which operand lies transposed, the least time of
several turns over fp32's. ``kernel_models/cpu_units.py`` has the figures of a processor without units.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch

from tracer.cpu_units import cpu_units

SIZES = ((64, 512, 1024), (256, 256, 256), (32, 1024, 128))
LAYOUTS = ("nn", "nt", "tn")
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def least_us(product: Callable[[], object], turns: int) -> float:
    """Return the least time of several calls after one that is not counted, µs."""
    product()
    found = float("inf")
    for _ in range(turns):
        begun = time.perf_counter()
        product()
        found = min(found, time.perf_counter() - begun)
    return found * 1e6


def operands(m: int, k: int, n: int, layout: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the operands of a product, of which "nt" has the second one transposed and "tn" the first."""
    a = torch.randn(k, m).to(dtype).t() if layout == "tn" else torch.randn(m, k).to(dtype)
    b = torch.randn(n, k).to(dtype).t() if layout == "nt" else torch.randn(k, n).to(dtype)
    return a, b


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=7)
    turns = parser.parse_args().turns
    units = " ".join(cpu_units()) or "not listed"
    print(f"units: {units}; {torch.get_num_threads()} threads, PyTorch {torch.__version__}")
    print(f"{'m×k×n':<16}{'layout':<8}" + "".join(f"{name:>10}" for name in TYPES))
    for m, k, n in SIZES:
        for layout in LAYOUTS:
            pairs = [operands(m, k, n, layout, dtype) for dtype in TYPES.values()]
            times = [least_us(partial(torch.matmul, *pair), turns) for pair in pairs]
            print(f"{f'{m}×{k}×{n}':<16}{layout:<8}" + "".join(f"{us / times[0]:>9.1f}×" for us in times))


if __name__ == "__main__":
    main()
