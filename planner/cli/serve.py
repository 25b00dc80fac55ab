"""``foretrace serve``: prefill and decode of a served decoder, and what a server makes of them."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from graph_predictor.cli.console import print_json, working
from graph_predictor.cli.edit_options import chosen_edits, with_edits_but
from graph_predictor.cli.errors import one_sentence
from graph_predictor.cli.options import Debug, Json, StepRegion, Top, shared
from graph_predictor.cli.profiles import profile_of
from graph_predictor.edits import registry
from kernel_models import device_choice
from planner.cli.serve_report import report, report_choices
from planner.serving import search
from planner.serving import serve as serving_serve
from planner.serving.errors import ServingError


@with_edits_but("cuda-graphs")
def serve(
    source: Annotated[str, typer.Argument(
        metavar="MODEL", help="A published model (llama-3.1-70b, qwen3-32b, deepseek-v3, gpt-oss-120b, …), a Hugging "
                              "Face config.json or its folder, or a workload (llama, gpt2, moe).")],
    device: Annotated[str, shared("--device")] = "h200-sxm",
    topology: Annotated[str | None, shared("--topology", "by default the device's usual nodes")] = None,
    assignments: Annotated[list[str] | None, shared("--set")] = None,
    preset: Annotated[str | None, shared("--preset")] = None,
    tp: Annotated[int, typer.Option(metavar="N", help="GPUs that share each layer.")] = 1,
    pp: Annotated[int, typer.Option(metavar="N", help="Pipeline stages.")] = 1,
    ep: Annotated[int, typer.Option(metavar="N", help="Groups among which whole experts are spread.")] = 1,
    attention_dp: Annotated[int, typer.Option(
        metavar="N", help="Groups of tp GPUs with sequences of their own, which share experts.")] = 1,
    precision: Annotated[str, typer.Option(
        metavar="TYPE", help="Of linear layers' weights: bf16, fp8, fp8_block, nvfp4, mxfp4, int8 or int4; by default "
                             "the model's.")] = "",
    experts: Annotated[str, typer.Option(metavar="TYPE", help="Of experts' weights, where it is another.")] = "",
    kv_dtype: Annotated[str, typer.Option(
        metavar="TYPE", help="Of the cache: bf16, fp8 or fp4; by default the model's.")] = "",
    engine: Annotated[str, typer.Option(
        metavar="NAME", help="vllm, sglang, trtllm, or compiled: a compiled model in a loop.")] = "vllm",
    chunk: Annotated[int, typer.Option(metavar="N", help="Tokens of a step at most; by default the engine's.")] = 0,
    cuda_graphs: Annotated[bool, typer.Option(
        "--cuda-graphs/--no-cuda-graphs", help="Decoding runs as CUDA graphs.")] = True,
    speculate: Annotated[str | None, typer.Option(
        metavar="K:ACCEPTED", help="Speculative decoding: drafts of K tokens, ACCEPTED tokens a step in the mean, such "
                                   "as 3:2.4.")] = None,
    batch: Annotated[int, shared("--batch", "sequences that decode at once")] = 1,
    context: Annotated[int, typer.Option(
        metavar="N", help="Tokens of each one's cache; by default the prompt and half of the answer.")] = 0,
    prompt: Annotated[str, typer.Option(
        metavar="N", help="Tokens of prompts: 1024, 512-2048 (any number between), or 1024~0.5 (gamma, coefficient of "
                          "variation); by default the context.")] = "",
    output: Annotated[str, typer.Option(metavar="N", help="Tokens of answers, in the same way (256).")] = "",
    rate: Annotated[float, typer.Option(metavar="R", help="Serve requests that come by chance, R a second.")] = 0.0,
    concurrency: Annotated[int, typer.Option(
        metavar="N", help="Serve N clients that each ask again when they have an answer.")] = 0,
    requests: Annotated[int, typer.Option(metavar="N", help="Requests that are simulated.")] = 0,
    target: Annotated[str | None, typer.Option(
        metavar="ttft=MS,tpot=MS", help="Search splits, copies, chunks and clients (or those that keep up with --rate) "
                                        "of --gpus for the most tokens within these means.")] = None,
    gpus: Annotated[int | None, shared("--gpus", "all copies together, with --target (8)")] = None,
    seed: Annotated[int, shared("--seed", least=0)] = 0,
    step_us: Annotated[float | None, typer.Option(
        metavar="US", help="Host time of a step that the GPU waits for, where it is known.")] = None,
    profile: Annotated[list[str] | None, shared("--profile", "repeatable; the first of the device counts")] = None,
    comm_profile: Annotated[str | None, shared("--comm-profile")] = None,
    comm_choices: Annotated[str | None, shared("--comm-choices")] = None,
    runs: Annotated[str | None, shared(
        "--calibrate", "columns concurrency, prompt, output, ttft_ms, tpot_ms and, if need be, tp, ep, attention_dp"
    )] = None,
    anchor: Annotated[str | None, typer.Option(
        metavar="TRACE", help="A trace of this model served so on this device: what each operation's kernels took over "
                              "what is predicted of its steps (vLLM names them; others decode --batch × --context) is "
                              "taken of all steps.")] = None,
    anchor_capture: Annotated[str | None, typer.Option(
        metavar="TRACE", help="A trace of the capture of --anchor's CUDA graphs, whose operations have their kernels."
    )] = None,
    step_region: StepRegion = None,
    top: Top = None,
    json: Json = False,
    debug: Debug = False,
    **edits: Any,
) -> None:
    """Predict how a decoder is served: a prompt's time, a step's of decoding, memory and the largest batch, and with
    --rate or --concurrency time to the first token, between tokens, and throughput.

    foretrace serve llama-3.1-70b --device h200-sxm --tp 8 --batch 32 --context 4096
    foretrace serve qwen3-32b --device h100-sxm --tp 2 --precision fp8 --concurrency 64 --prompt 1024 --output 512
    foretrace serve llama-3.1-8b --gpus 8 --target ttft=500,tpot=20 --prompt 2048 --output 256

    With --target ends with status 1 where nothing meets it.
    """
    with one_sentence(debug):
        changes = registry.made(registry.chosen(chosen_edits(edits)))
        known = profile_of(profile, device_choice.find_device(device))
        if target is not None:
            if given := [name for name, value, usual in (
                    ("--tp", tp, 1), ("--pp", pp, 1), ("--ep", ep, 1), ("--attention-dp", attention_dp, 1),
                    ("--chunk", chunk, 0), ("--batch", batch, 1), ("--context", context, 0),
                    ("--concurrency", concurrency, 0), ("--requests", requests, 0), ("--step-us", step_us, None),
                    ("--calibrate", runs, None), ("--anchor", anchor, None),
                    ("--anchor-capture", anchor_capture, None),
                    ("--step-region", step_region, None)) if value != usual]:
                raise ServingError(f"--target searches splits and loads of the engine as it is taken to be, which "
                                   f"{given[0]} says otherwise; leave one of them out.")
            with working("Pricing and serving"):
                choices = search.serve_search(
                    source, 8 if gpus is None else gpus, target=target, device=device, topology=topology,
                    settings=assignments or (), preset=preset, prompt=prompt or 1024, output=output or 256, rate=rate,
                    precision=precision, experts=experts, kv_dtype=kv_dtype, engine=engine, cuda_graphs=cuda_graphs,
                    speculate=speculate, seed=seed, profile=known, comm_profile=comm_profile,
                    comm_choices=comm_choices, edits=changes)
            if json:
                print_json(choices.to_json())
            else:
                report_choices(choices, top)
            if not choices.choices:
                raise typer.Exit(1)
            return
        if gpus is not None:
            raise ServingError("--gpus is of --target, which searches how to split them; give --tp, --pp, --ep and "
                               "--attention-dp for one copy.")
        with working("Pricing"):
            found = serving_serve.serve(
                source, device=device, topology=topology, settings=assignments or (), preset=preset, tp=tp, pp=pp,
                ep=ep, attention_dp=attention_dp, precision=precision, experts=experts, kv_dtype=kv_dtype,
                engine=engine, chunk=chunk, cuda_graphs=cuda_graphs, speculate=speculate, batch=batch, context=context,
                prompt=prompt, output=output, rate=rate, concurrency=concurrency, requests=requests, seed=seed,
                step_us=step_us, profile=known, comm_profile=comm_profile, comm_choices=comm_choices, measured=runs,
                anchor=anchor, anchor_capture=anchor_capture, step_region=step_region,
                edits=changes)
        if json:
            print_json(found.to_json())
        else:
            report(found, top)
