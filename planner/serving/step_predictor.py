"""``step_predictor``: times of the steps that an engine's own scheduler forms, for simulators that run the scheduler.

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
    """A request in a step, in the form of SGLang's simulator."""

    extend_length: int
    past_kv_length: int


class ScheduledBatch(Protocol):
    """A step, in the form of SGLang's simulator."""

    @property
    def reqs(self) -> Sequence[ScheduledRequest]:
        """Return the requests of the step."""
        ...


class StepPredictor:
    """Prices steps of one replica, without the engine's host time, because the real scheduler takes that time itself.

    A request with one new token and cached tokens decodes. Every other request reads a piece of its prompt. Each gets a
    token from the step.

    Args:
        model: the times of steps.
    """

    def __init__(self, model: ServingModel) -> None:
        self.model = model

    def seconds(self, new: Sequence[int], computed: Sequence[int]) -> float:
        """Return the time of a step, seconds.

        Args:
            new: tokens of each request that the step computes [n].
            computed: cached tokens of each request [n].

        Raises:
            ServingError: the two differ in length, or a number of tokens is not possible.
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
        """Return further metrics for the simulator: none."""
        return {}

    def reset_metrics(self) -> None:
        """Do nothing: there are no metrics to reset."""


@by_fields(ServeRequest)
def step_predictor(request: ServeRequest) -> StepPredictor:
    """Return the predictor of a replica's steps. The arguments are the fields of a ``ServeRequest``.

    Raises:
        EditError: an edit is not possible.
        ServingError: the replica cannot be split in this way.
        ForetraceError: a name or a file is unknown, or cannot be read.
    """
    decoder = request.decoder()
    plain, _, _ = request.model(decoder, request.setup(decoder))
    return StepPredictor(edited_model(plain.with_rates(replace(plain.rates, step_us=0.0)), request.edits))
