"""What a server is asked for (``Requests``), and the memory that its caches have (``CacheAccount``)."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import numpy as np

from graph_predictor.request.memory_fit import CONTEXT
from kernel_models.collectives.datasheet import COMMUNICATOR_BYTES
from kernel_models.device import DeviceSpec
from planner.serving.setup import ServingError, ServingSetup, weight_type
from tracer.arrays import Float64, Int64
from tracer.shape_only.transformer import TransformerShape

GRAPHS = 1.0e9
"""Bytes that captured CUDA graphs of many batches hold: an assumption (vLLM and SGLang log 0.5 to 3 GB)."""
STATE_BYTES = 4
"""Bytes of a value of a recurrence's state."""


@dataclass(frozen=True, slots=True)
class CacheAccount:
    """Memory of the fullest GPU, bytes.

    Attributes:
        device: that there is.
        weights: of its share of the model.
        workspace: activations of a step, logits, CUDA graphs, context and communicators.
        room: what is left for caches within the engine's share of memory; below 0: not even the weights fit.
        sequence: that each sequence takes whatever its length: a recurrence's state and full windows.
        token: that each token of a sequence's context takes.
        groups: of GPUs that have sequences of their own.
    """

    device: float
    weights: float
    workspace: float
    room: float
    sequence: float
    token: float
    groups: int

    def of(self, context: float) -> float:
        """Return what a sequence of so many tokens takes on a GPU of its group."""
        return self.sequence + self.token * context

    def largest_batch(self, context: int) -> int:
        """Return how many sequences of so many tokens fit a replica."""
        each = self.of(context)
        return self.groups * int(max(self.room, 0.0) // each) if each else 1 << 20

    def check(self, batch: int, context: int, what: str) -> None:
        """Raise ``ServingError``, in one sentence, unless so many sequences of so many tokens fit."""
        if self.room <= 0:
            raise ServingError(f"{what} does not fit: a GPU's share of the weights is {self.weights / 1e9:,.1f} GB, "
                               f"work space {self.workspace / 1e9:,.1f}, and the engine uses "
                               f"{(self.weights + self.workspace + self.room) / 1e9:,.1f} of its "
                               f"{self.device / 1e9:,.1f} GB; give more GPUs (--tp) or a narrower type (--precision).")
        if batch > (most := self.largest_batch(context)):
            raise ServingError(f"{batch:,} sequences of {context:,} tokens do not fit: their cache takes "
                               f"{self.of(context) * -(-batch // self.groups) / 1e9:,.1f} GB of a GPU and there is "
                               f"room for {self.room / 1e9:,.1f}; the largest batch is {most:,}.")


def cache_account(shape: TransformerShape, setup: ServingSetup, device: DeviceSpec, longest: int) -> CacheAccount:
    """Return the memory of a replica whose sequences have so many tokens at most."""
    linear, experts = weight_type(setup.precision, device), weight_type(setup.of_experts, device)
    weights, token, sequence = 0.0, 0.0, 0.0
    width = setup.kv_bytes(shape)
    for run in shape.runs:
        layers = run.layers / setup.pp
        routed = run.expert_parameters(setup.ep, setup.expert_tp)
        router = run.hidden * run.experts
        dense = run.dense_parameters(setup.tp) - router
        weights += layers * (dense * linear.bytes + router * 2 + routed * experts.bytes)
        if run.attends:
            each = layers * width * (run.latent.key_rank + run.latent.rotated if run.latent is not None else
                                     setup.kv_heads(run) * (run.width_of_head + run.width_of_values))
            if run.window and run.window < longest:
                sequence += each * run.window
            else:
                token += each
        if run.state is not None:
            own = run.state.share(setup.tp)
            sequence += layers * (own.inner * own.state * STATE_BYTES + own.mixed * own.window * 2)
    weights += shape.root_parameters(setup.tp) * shape.element_bytes
    if setup.speculation is not None:
        block = shape.runs[-1]
        weights += block.dense_parameters(setup.tp) * linear.bytes + experts.bytes * block.expert_parameters(
            setup.ep, setup.expert_tp)
    tokens = min(setup.step_tokens, max(longest, 1) * 4)
    inner = max(max(2 * kind.ffn // setup.dense_tp if not kind.experts else 2 * kind.top_k * kind.ffn // setup.expert_tp
                    for kind in shape.kinds), 4 * shape.hidden)
    logits = min(setup.engine.sequences, 256) * shape.vocab * 4
    groups = sum(size > 1 for size in (setup.layer_gpus, setup.pp))
    workspace = (tokens * (4 * shape.hidden + inner) * shape.element_bytes + logits + CONTEXT
                 + groups * COMMUNICATOR_BYTES + (GRAPHS if setup.graphs else 0.0))
    total, share = device.memory_gb * 1e9, setup.engine.memory
    left = total - weights - workspace
    room = share * left if setup.engine.of_rest and left > 0 else total * share - weights - workspace
    return CacheAccount(total, weights, workspace, room, sequence, token, setup.attention_dp)


MOST_TOKENS = 1 << 24
MOST_REQUESTS = 200_000


@dataclass(frozen=True, slots=True)
class Lengths:
    """Numbers of tokens.

    Attributes:
        least, most: uniform between them; equal: always so many.
        spread: coefficient of variation of a gamma distribution about ``least`` in place of that; 0 for none.
    """

    least: int
    most: int
    spread: float = 0.0

    @staticmethod
    def parse(text: str, option: str) -> Lengths:
        """Return what "1024", "512-2048" (uniform) or "1024~0.5" (gamma, coefficient of variation) says.

        Raises:
            ServingError: it says nothing, or nothing that can be.
        """
        match = re.fullmatch(r"\s*(\d{1,9})(?:-(\d{1,9})|~(\d{1,3}(?:\.\d{1,6})?))?\s*", text)
        if match is None:
            raise ServingError(f"{option} {text[:40]!r} is no number of tokens; give 1024, 512-2048 for any number "
                               "between, or 1024~0.5 for a gamma distribution with that coefficient of variation.")
        least, most = int(match.group(1)), int(match.group(2) or match.group(1))
        spread = float(match.group(3) or 0.0)
        if not 1 <= least <= most <= MOST_TOKENS or spread > 10:
            raise ServingError(f"{option} {text.strip()} cannot be: tokens go from 1 to {MOST_TOKENS:,}, from few to "
                               "many, with a coefficient of variation up to 10.")
        return Lengths(least, most, spread)

    @property
    def mean(self) -> float:
        """Tokens in the mean."""
        return (self.least + self.most) / 2

    @property
    def longest(self) -> int:
        """Tokens at most; of a gamma distribution what 1 in 1,000 is longer than, or nearly."""
        return self.most if not self.spread else math.ceil(self.least * (1 + 4 * self.spread))

    def draw(self, count: int, random: np.random.Generator) -> Int64:
        """Return so many numbers of tokens."""
        if self.spread:
            shape = 1.0 / self.spread**2
            found = random.gamma(shape, self.least / shape, count)
            return np.clip(np.rint(found), 1, self.longest).astype(np.int64)
        return random.integers(self.least, self.most + 1, count)

    def __str__(self) -> str:
        if self.spread:
            return f"{self.least:,}~{self.spread:g}"
        return f"{self.least:,}" if self.least == self.most else f"{self.least:,}-{self.most:,}"


@dataclass(frozen=True, slots=True)
class Requests:
    """A load.

    Attributes:
        prompt, output: tokens of requests.
        concurrency: clients that each ask again as soon as they have an answer; 0 where ``rate`` says when.
        rate: requests a second that come by chance (Poisson); 0 where ``concurrency`` says how many there are.
        count: of all requests; 0 for ``WAVES`` of them for each client, or as many of a rate as tell percentiles.
            Counted are those after ``warm_up``.
        seed: of what is drawn.
        warm_up: of the first requests, how many are served and not counted: they all come at once.

    Raises:
        ServingError: neither or both of concurrency and rate are given, or one cannot be.
    """

    prompt: Lengths
    output: Lengths
    concurrency: int = 0
    rate: float = 0.0
    count: int = 0
    seed: int = 0
    warm_up: int = 0

    def __post_init__(self) -> None:
        if not (self.rate == 0 or LEAST_RATE <= self.rate <= MOST_RATE):
            raise ServingError(f"rate={self.rate!r} is no number of requests a second; give one from {LEAST_RATE:g} to "
                               f"{MOST_RATE:,.0f}.")
        if self.concurrency < 0 or self.concurrency > MOST_REQUESTS:
            raise ServingError(f"concurrency={self.concurrency!r} is no number of clients; give one from 1 to "
                               f"{MOST_REQUESTS:,}.")
        if not isinstance(self.seed, int) or isinstance(self.seed, bool) or self.seed < 0:
            raise ServingError(f"seed={self.seed!r} is no seed; give a whole number from 0.")
        if bool(self.rate) == bool(self.concurrency):
            raise ServingError("A load is either a rate of requests or a number of clients at once; give one of --rate "
                               "and --concurrency, above 0.")
        if not 0 <= self.warm_up < self.requests:
            raise ServingError(f"warm_up={self.warm_up!r} leaves none of {self.requests:,} requests to count; give "
                               "less.")
        if 0 < self.count < self.concurrency:
            raise ServingError(f"{self.count:,} requests do not keep {self.concurrency:,} clients busy; give "
                               f"{self.concurrency:,} or more.")
        if not 0 <= self.count <= MOST_REQUESTS:
            raise ServingError(f"count={self.count!r} is no number of requests; give one up to {MOST_REQUESTS:,}.")

    @property
    def requests(self) -> int:
        """How many requests are simulated."""
        if self.count:
            return self.count
        if self.concurrency:
            return min(WAVES * self.concurrency, MOST_REQUESTS)
        return min(max(math.ceil(self.rate * SECONDS_OF_A_RATE), OF_A_RATE), MOST_OF_A_RATE)

    def drawn(self) -> tuple[Float64, Int64, Int64]:
        """Return when requests come, µs (all zero for clients that wait), and the tokens of prompts and outputs [n]."""
        random = np.random.default_rng(self.seed)
        n = self.requests
        prompts, outputs = self.prompt.draw(n, random), self.output.draw(n, random)
        if not self.rate:
            return np.zeros(n), prompts, outputs
        # So many arrivals of a Poisson process within the time that they take in the mean: the rate is met exactly.
        return np.sort(random.uniform(0.0, n / self.rate * 1e6, n)), prompts, outputs


WAVES = 6
"""Requests of each client: benchmarks of servers usually send 4 to 10."""
OF_A_RATE, SECONDS_OF_A_RATE, MOST_OF_A_RATE = 400, 60.0, 4000
"""Requests of a rate: enough for the 90th percentile, and those of a minute, up to a number that is quickly served."""
LEAST_RATE, MOST_RATE = 1e-6, 1e6
