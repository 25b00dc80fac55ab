"""The command line and the loop that the programs here share: ``--batch``, ``--seq`` and the like, and ``--steps``."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable
from typing import Any

import torch


def run(build: Callable[..., Callable[[], Any]]) -> None:
    """Build the step with the sizes of the command line, and run it."""
    parser = argparse.ArgumentParser()
    sizes = {name: one.default for name, one in inspect.signature(build).parameters.items()}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--steps", type=int, default=30)
    options = vars(parser.parse_args())
    torch.manual_seed(0)
    step = build(**{name: options[name] for name in sizes})
    for _ in range(options["steps"]):
        step()
