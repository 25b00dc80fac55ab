"""``serve_search``: the configuration of a number of GPUs that serves most tokens within a target of latency.

    splits of a replica × replicas × chunk ──ServingModel, once each──▶ surfaces ──served at every concurrency──▶ best
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from graph_predictor.prediction.scenario import EditError
from planner.requests import by_fields
from planner.serving.edited import edited_model
from planner.serving.serve import (
    USUAL_OUTPUT,
    USUAL_PROMPT,
    ServedLoad,
    ServedModelRequest,
    check_length,
    served_load,
)
from planner.serving.setup import CacheAccount, Lengths, Requests, ServingError, ServingSetup, cache_account
from planner.serving.source import ServedDecoder
from planner.serving.steps import ServingModel
from tracer.lazy import pandas
from tracer.shown import Shown

CHUNKS, MOST_CLIENTS, MOST_GPUS = (2048, 8192), 1024, 1024
"""Limits of the search: tokens of a step that are tried, most clients of a replica, and most GPUs."""
WAVES = 3
"""Requests of each client in the comparison of configurations; ``serve`` simulates more."""


@dataclass(frozen=True, slots=True)
class LatencyTarget:
    """Largest allowed mean latencies, ms; infinity for no limit.

    Attributes:
        ttft_ms: time to the first token.
        tpot_ms: time between further tokens.
    """

    ttft_ms: float = math.inf
    tpot_ms: float = math.inf

    @staticmethod
    def parse(text: str) -> LatencyTarget:
        """Parse "ttft=500,tpot=30", ms. Raises ``ServingError``."""
        found: dict[str, float] = {}
        for part in text.split(","):
            match = re.fullmatch(r"\s*(ttft|tpot)\s*=\s*(\d{1,9}(?:\.\d{1,6})?)\s*(?:ms)?\s*", part.lower())
            if match is None or match.group(1) in found or not float(match.group(2)):
                raise ServingError(f"--target {text[:40]!r} is no target of latency; give ms in the mean, such as "
                                   "ttft=500,tpot=30.")
            found[match.group(1)] = float(match.group(2))
        return LatencyTarget(found.get("ttft", math.inf), found.get("tpot", math.inf))

    def met(self, got: ServedLoad) -> bool:
        """Return whether a load's expected latencies meet the target."""
        return got.ttft_ms.value <= self.ttft_ms and not got.tpot_ms.value > self.tpot_ms

    def surely(self, got: ServedLoad) -> bool:
        """Return whether a load's latencies meet the target even at the slow ends of their 80% intervals."""
        return got.ttft_ms.high <= self.ttft_ms and not got.tpot_ms.high > self.tpot_ms

    def __str__(self) -> str:
        parts = [f"{name} {value:g} ms" for name, value in (("TTFT", self.ttft_ms), ("TPOT", self.tpot_ms))
                 if math.isfinite(value)]
        return " and ".join(parts) or "any latency"


@dataclass(frozen=True, slots=True)
class ServingChoice:
    """A configuration, with the load that it serves.

    Attributes:
        setup: setup of a replica.
        replicas: number of replicas.
        got: what a replica's load gets.
    """

    setup: ServingSetup
    replicas: int
    got: ServedLoad

    @property
    def tokens_per_second(self) -> float:
        """Tokens of answers per second, of all replicas."""
        return self.replicas * self.got.tokens_per_second.value

    @property
    def tokens_per_gpu(self) -> float:
        """Tokens of answers per second, per GPU."""
        return self.got.tokens_per_second.value / self.setup.gpus


@dataclass(frozen=True, repr=False)
class ServingChoices(Shown):
    """The configurations that a search found, best first.

    Attributes:
        model, device: names.
        gpus: number of GPUs of all replicas together.
        target: target of latency.
        prompt, output, rate: the load.
        choices: the best configuration of each split and chunk that meets the target.
        tried: number of simulated configurations, including those that miss the target.
        refused: splits that are not possible, with the reason.
        notes: assumptions.
    """

    model: str
    device: str
    gpus: int
    target: LatencyTarget
    prompt: Lengths
    output: Lengths
    rate: float
    choices: tuple[ServingChoice, ...]
    tried: int
    refused: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]

    def headline(self) -> str:
        """Return the best configuration in a line."""
        where = f"{self.model} on {self.gpus} {self.device} within {self.target}: {self.tried:,} configurations served"
        if not self.choices:
            return f"{where}, none within the target"
        best = self.choices[0]
        return (f"{where}; best {best.replicas} × {best.setup} with {best.got.load.concurrency or self.rate:g} "
                f"{'clients each' if best.got.load.concurrency else 'requests/s'}: "
                f"{best.tokens_per_second:,.0f} tokens/s")

    def tables(self) -> Mapping[str, Callable[[], pandas.DataFrame]]:
        """Return tables of the configurations, and of the reasons against others."""
        return {"choices": self._choices, "refused": self._refused}

    def rows(self) -> list[dict[str, Any]]:
        """Return the configurations as plain values."""
        return [{
            "replicas": each.replicas, "setup": str(each.setup), "gpus": each.replicas * each.setup.gpus,
            "chunk": each.setup.step_tokens, "concurrency": each.got.load.concurrency,
            "tokens_per_second": each.tokens_per_second, "tokens_per_second_per_gpu": each.tokens_per_gpu,
            "ttft_ms": each.got.ttft_ms.value, "ttft_low": each.got.ttft_ms.low, "ttft_high": each.got.ttft_ms.high,
            "tpot_ms": each.got.tpot_ms.value, "tpot_low": each.got.tpot_ms.low, "tpot_high": each.got.tpot_ms.high,
            "surely": self.target.surely(each.got)} for each in self.choices]

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return {"model": self.model, "device": self.device, "gpus": self.gpus, "target": str(self.target),
                "prompt": str(self.prompt), "output": str(self.output), "rate": self.rate, "tried": self.tried,
                "choices": self.rows(),
                "refused": [{"setup": setup, "reason": reason} for setup, reason in self.refused],
                "notes": list(self.notes)}

    def _choices(self) -> pandas.DataFrame:
        return pandas.DataFrame(self.rows())

    def _refused(self) -> pandas.DataFrame:
        return pandas.DataFrame(list(self.refused), columns=["setup", "reason"])


@dataclass(frozen=True, kw_only=True)
class ServeSearchRequest(ServedModelRequest):
    """A request for the best configuration of a number of GPUs.

    Attributes:
        gpus: number of GPUs of all replicas together.
        target: largest means, ms, such as "ttft=500,tpot=30". Without ``rate``, numbers of clients are searched too.
    """

    gpus: int = field(kw_only=False)
    target: str | LatencyTarget = ""

    def __post_init__(self) -> None:
        if not isinstance(self.gpus, int) or isinstance(self.gpus, bool) or not 1 <= self.gpus <= MOST_GPUS:
            raise ServingError(f"gpus={self.gpus!r} is not possible; give a whole number from 1 to {MOST_GPUS:,}.")


@by_fields(ServeSearchRequest)
def serve_search(request: ServeSearchRequest) -> ServingChoices:
    """Find how GPUs serve most tokens within a target of latency; for a given rate, how they serve it with the least
    time between tokens. The arguments are the fields of a ``ServeSearchRequest``.

    Raises:
        EditError: an edit is not possible with any split.
        ServingError: the model fits with no split, or the load is not possible.
    """
    gpus, rate, target = request.gpus, request.rate, request.target
    goal = target if isinstance(target, LatencyTarget) else LatencyTarget.parse(target) if target else LatencyTarget()
    decoder, spec = request.decoder(), request.spec()
    prompts = Lengths.parse(str(request.prompt or USUAL_PROMPT), "--prompt")
    outputs = Lengths.parse(str(request.output or USUAL_OUTPUT), "--output")
    longest = prompts.longest + outputs.longest
    check_length(decoder, longest)
    start = request.setup(decoder)
    choices, refused, tried = [], [], 0
    for setup in _splits(decoder, start, gpus):
        try:
            setup.check(decoder.shape)
            cache = cache_account(decoder.shape, setup, spec, longest)
            cache.check(1, longest, f"{decoder.name} on {setup.gpus} {spec.name}")
            model = edited_model(ServingModel(decoder.shape, setup, spec, request.cluster(setup.gpus), request.profile),
                                 request.edits)
        except (ServingError, EditError) as error:
            refused.append((str(setup), str(error)))
            continue
        for chunk in (CHUNKS if setup.engine.splits else (0,)):
            own = model.with_chunk(chunk)
            best, number = _best(own, cache, prompts, outputs, gpus // setup.gpus, rate, goal,
                                 request.seed)
            tried += number
            if best is not None:
                choices.append(best)
    if not choices and refused and tried == 0:
        raise ServingError(refused[-1][1])
    if rate:
        choices.sort(key=lambda each: each.got.tpot_ms.value)
    else:
        choices.sort(key=lambda each: -each.replicas * each.got.tokens_per_second.value)
    return ServingChoices(decoder.name, spec.name, gpus, goal, prompts, outputs, rate, tuple(choices), tried,
                          tuple(refused), decoder.notes)


def _splits(decoder: ServedDecoder, start: ServingSetup, gpus: int) -> Iterator[ServingSetup]:
    """Yield splits of a replica: attention over powers of two of GPUs, experts whole or shared, attention groups."""
    routed = any(kind.experts for kind in decoder.shape.kinds)
    sizes = [1 << power for power in range(4) if gpus % (1 << power) == 0]
    for size in sizes:
        for groups in ([each for each in sizes if size % each == 0] if routed else [1]):
            for ep in sorted({1, size} if routed else {1}):
                if groups == 1 or ep == size:
                    yield replace(start, tp=size // groups, attention_dp=groups, ep=ep)


def _best(model: ServingModel, cache: CacheAccount, prompts: Lengths, outputs: Lengths, replicas: int, rate: float,
          goal: LatencyTarget, seed: int) -> tuple[ServingChoice | None, int]:
    """Return the best configuration of a split that meets the target, and the number of simulated loads."""
    setup = model.setup
    if rate:
        got = served_load(Requests(prompts, outputs, rate=rate / replicas, seed=seed), model, cache)
        return (ServingChoice(setup, replicas, got) if goal.met(got) and got.keeps_up else None), 1
    best, tried, clients = None, 0, 1
    while clients <= MOST_CLIENTS:
        load = Requests(prompts, outputs, clients, count=max(WAVES * clients, 4), seed=seed, warm_up=clients,
                        apart=True)
        got = served_load(load, model, cache)
        tried += 1
        if goal.met(got) and (best is None or got.tokens_per_second.value > best.got.tokens_per_second.value):
            best = ServingChoice(setup, replicas, got)
        if got.tpot_ms.value > goal.tpot_ms or got.ttft_ms.value > 4 * goal.ttft_ms:
            break
        if best is not None and got.tokens_per_second.value < 0.9 * best.got.tokens_per_second.value:
            break
        clients *= 2
    return best, tried
