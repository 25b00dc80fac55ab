"""Options that several planning commands have."""

from __future__ import annotations

from typing import Annotated

import typer

from graph_predictor.cli.options import shared

DecoderSource = Annotated[str, typer.Argument(
    metavar="SOURCE", help="A workload (llama, gpt2, moe), a capture or shape-only trace of one, a model's config.json "
                           "or its folder, or a published model (deepseek-v3, gpt-oss-120b, …).")]
TrainedPreset = Annotated[str | None, shared(
    "--preset", "or a trained model: llama 8b, 70b, 405b; gpt2 xl, 175b; moe 8x7b; the first by default")]
Profiles = Annotated[list[str] | None, shared("--profile", "repeatable; the first of the device counts")]
