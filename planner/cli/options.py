"""Options that several planning commands have."""

from __future__ import annotations

from typing import Annotated

import typer

from step_views.cli.options import shared

DecoderSource = Annotated[str, typer.Argument(
    metavar="SOURCE", help="A workload (llama, gpt2, moe), a capture or shape-only trace of one, a model's config.json "
                           "or its folder, or a published model (deepseek-v3, gpt-oss-120b, …).")]
TrainedPreset = Annotated[str | None, shared(
    "--preset", "or a trained model: llama 8b, 70b, 405b; gpt2 xl, 175b; moe 8x7b; the first by default")]
Profiles = Annotated[list[str] | None, shared("--profile", "repeatable; the first of the device counts")]

Tp = Annotated[int, typer.Option(metavar="N", help="GPUs that share each layer.")]
Precision = Annotated[str, typer.Option(
    metavar="TYPE", help="Of linear layers' weights: bf16, fp8, fp8_block, nvfp4, mxfp4, int8 or int4; by default the "
                         "model's.")]
Engine = Annotated[str, typer.Option(
    metavar="NAME", help="vllm, sglang, trtllm, nemo (TensorRT-LLM of 2023 as NeMo exports it), or compiled: a "
                         "compiled model in a loop.")]
CacheTokens = Annotated[int, typer.Option(
    metavar="N", help="Tokens of each one's cache; by default the prompt and half of the answer.")]
PromptTokens = Annotated[str, typer.Option(
    metavar="N", help="Tokens of prompts: 1024, 512-2048 (any number between), or 1024~0.5 (gamma, coefficient of "
                      "variation); by default the context.")]
