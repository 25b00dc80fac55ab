"""``step_predictor``: the time of each step that an engine's own scheduler makes up, for simulators that run it.

    predictor = foretrace.step_predictor("llama-3.1-70b", device="h200-sxm", tp=8, engine="sglang")
    predictor.seconds(new=[1, 1, 512], computed=[900, 40, 0])       # two sequences decode next to a piece of a prompt

SGLang's simulator (``tools/sglang-simulator`` of its repository; forks of it run vLLM's scheduler) calls
``InferTimePredictor.predict_infer_time(batch)`` for seconds. Each of the batch's ``reqs`` has ``extend_length``, tokens
that the step computes, and ``past_kv_length``, tokens in the cache. ``StepPredictor`` is such a predictor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from planner.requests import by_fields
from planner.serving.edited import edited_model
from planner.serving.serve import ServeRequest
from planner.serving.setup import ServingError
from planner.serving.step_grids import PrefillChunk
from planner.serving.steps import ServingModel


class ScheduledRequest(Protocol):
    """A request of a step, as SGLang's simulator describes it."""

    extend_length: int
    past_kv_length: int


class ScheduledBatch(Protocol):
    """A step, as SGLang's simulator describes it."""

    @property
    def reqs(self) -> Sequence[ScheduledRequest]:
        """Return its requests."""
        ...


class StepPredictor:
    """Prices steps of one replica, without the engine's own host time: the scheduler that asks is the real one.

    A request with one new token and something in the cache decodes; every other reads a piece of its prompt, and each
    gets a token from the step.

    Args:
        model: the times of steps.
    """

    def __init__(self, model: ServingModel) -> None:
        self.model = model

    def seconds(self, new: Sequence[int], computed: Sequence[int]) -> float:
        """Return the time of a step.

        Args:
            new: tokens that it computes of each request [n].
            computed: those of each that the cache has [n].

        Raises:
            ServingError: the two do not have one length, or a number of tokens cannot be.
        """
        if len(new) != len(computed):
            raise ServingError(f"A step has new tokens of {len(new)} requests and cached ones of {len(computed)}; give "
                               "both of each.")
        for tokens, past in zip(new, computed, strict=True):
            if tokens < 1 or past < 0:
                raise ServingError(f"A step cannot compute {tokens} tokens of a request while the cache has {past}; "
                                   "give 1 token or more, and 0 cached tokens or more.")
        drafted = self.model.setup.drafted
        contexts = [past + tokens for tokens, past in zip(new, computed, strict=True) if tokens <= drafted and past]
        read = Counter((tokens, past) for tokens, past in zip(new, computed, strict=True)
                       if not (tokens <= drafted and past))
        if not contexts and not read:
            return 0.0
        pieces = [PrefillChunk(count, tokens, past) for (tokens, past), count in read.items()]
        context = sum(contexts) / len(contexts) if contexts else 0.0
        return self.model.surface.us(len(contexts), context, pieces, sum(read.values())) / 1e6

    def predict_infer_time(self, batch: ScheduledBatch) -> float:
        """Return the time of a batch of SGLang's simulator, seconds. Raises ``ServingError``."""
        return self.seconds([each.extend_length for each in batch.reqs], [each.past_kv_length for each in batch.reqs])

    def get_metrics(self) -> dict[str, Any]:
        """Return further metrics that the simulator shows of a predictor: none."""
        return {}

    def reset_metrics(self) -> None:
        """Forget what ``get_metrics`` returns."""


@by_fields(ServeRequest)
def step_predictor(request: ServeRequest) -> StepPredictor:
    """Return the predictor of a replica's steps; called with the fields of a ``ServeRequest``.

    Raises:
        EditError: an edit cannot be done.
        ServingError: the replica cannot be split so.
        ForetraceError: a name or a file is not known, or cannot be read.
    """
    decoder = request.decoder()
    plain, _, _ = request.model(decoder, request.setup(decoder))
    return StepPredictor(edited_model(plain.with_rates(replace(plain.rates, step_us=0.0)), request.edits))
