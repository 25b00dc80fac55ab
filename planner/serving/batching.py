"""``simulate_serving``: continuous batching as a discrete simulation over predicted steps.

    requests ──admitted──▶ prompts read in pieces ──▶ sequences that decode ──▶ answers
                 ▲ while the cache has room              │ evicted when it is full, and read again

Time goes from step to step. Events are: a request comes, a prompt ends, an answer ends, the cache is full. Between two
events all steps are alike, except that contexts grow by the tokens of a step. They are therefore priced together, at
the context in their middle.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from planner.serving.setup import CacheAccount, Mixing, Requests, ServingError, ServingSetup
from planner.serving.step_grids import PrefillChunk
from tracer.arrays import Float64, Int64


class StepTimes(Protocol):
    """The times of steps that the simulation needs."""

    def us(self, sequences: float, context: float, pieces: Sequence[PrefillChunk] = (), finished: float = 0.0) -> float:
        """Return the time of a step, µs."""
        ...


MOST_STEPS = 2_000_000
"""Most events of a simulation."""


@dataclass(slots=True)
class _Request:
    """A request in the simulation.

    Attributes:
        number: index of the request.
        arrival: time at which it was sent, µs.
        prompt, output: tokens of the prompt and of the answer.
        cached: tokens of the prompt that are in the shared cache.
        made: tokens of the answer made so far.
        read: tokens of the prompt read so far; after an eviction, also tokens of the answer that are read again.
        first: time of its first token, µs.
    """

    number: int
    arrival: float
    prompt: int
    output: int
    cached: int = 0
    made: int = 0
    read: int = 0
    first: float = math.nan

    @property
    def own(self) -> int:
        """Tokens of the prompt that no other request shares."""
        return self.prompt - self.cached

    @property
    def to_read(self) -> int:
        """Tokens that are not yet in any cache."""
        return self.prompt + self.made - self.read


@dataclass(frozen=True, slots=True)
class ServedRequests:
    """Results of a load's requests.

    Attributes:
        ttft_us: time from a request to its first token [n].
        tpot_us: mean time between tokens of an answer after the first [n]; NaN for answers of one token.
        end_us: time from a request to the end of its answer [n].
        arrival_us: time of its arrival [n].
        prompt, output: tokens [n].
        makespan_us: time from the first counted request to the last answer.
        busy: share of time with steps running, from the first request to the last answer of all.
        preempted: number of evictions.
        running: mean number of decoding sequences over time.
        steps: number of the simulation's events, each of one or several equal steps.
    """

    ttft_us: Float64
    tpot_us: Float64
    end_us: Float64
    arrival_us: Float64
    prompt: Int64
    output: Int64
    makespan_us: float
    busy: float
    preempted: int
    running: float
    steps: int

    @property
    def tokens_per_second(self) -> float:
        """Tokens of answers per second."""
        return float(self.output.sum()) / self.makespan_us * 1e6

    @property
    def requests_per_second(self) -> float:
        """Answers per second."""
        return len(self.output) / self.makespan_us * 1e6

    @property
    def in_flight(self) -> float:
        """Mean number of requests in flight over time."""
        return float(self.end_us.sum()) / self.makespan_us

    def mean_ttft_us(self) -> float:
        """Return the mean of ``ttft_us``."""
        return float(self.ttft_us.mean())

    def mean_tpot_us(self) -> float:
        """Return the mean of ``tpot_us``."""
        return float(np.nanmean(self.tpot_us)) if np.isfinite(self.tpot_us).any() else math.nan


class _Front:
    """The server's front end, which handles one request after another.

    Args:
        each_us: time of each request, µs.
    """

    def __init__(self, each_us: float) -> None:
        self._each = each_us
        self._ready: deque[tuple[float, _Request]] = deque()
        self._free = 0.0

    def send(self, request: _Request, at: float) -> None:
        """Accept a request that is sent at time ``at``, µs."""
        request.arrival = at
        self._free = max(self._free, at) + self._each
        self._ready.append((self._free, request))

    @property
    def next_us(self) -> float:
        """Time at which the next request reaches the engine; infinity without one."""
        return self._ready[0][0] if self._ready else math.inf

    def arrived(self, now: float) -> list[_Request]:
        """Return the requests that have reached the engine by ``now``, and remove them."""
        found = []
        while self._ready and self._ready[0][0] <= now:
            found.append(self._ready.popleft()[1])
        return found


@dataclass(slots=True)
class _Server:
    """The simulated server: its requests, its caches and its clock, µs."""

    setup: ServingSetup
    surface: StepTimes
    cache: CacheAccount
    shared: int = 0
    """Tokens of the prefix that all requests share."""
    waiting: deque[_Request] = field(default_factory=deque)
    reading: list[_Request] = field(default_factory=list)
    running: list[tuple[int, int, _Request, int]] = field(default_factory=list)
    """A heap: step at which the answer ends, number, request, step at which it joined."""
    clock: float = 0.0
    step: int = 0
    taken: float = 0.0
    context: float = 0.0
    preempted: int = 0
    busy: float = 0.0
    decoding_us: float = 0.0
    promised: float = 0.0
    """Tokens of the prompts and whole answers of the decoding sequences."""
    hope: float = 0.0
    """Share of the rest of running answers for which room is kept (``AnswerReserve``), at step ``hoped_at``."""
    hoped_at: int = 0
    """The step from which that share falls."""
    waits_until: int = -1
    """The step from which waiting prompts are read, however few; negative if no prompt waits for others."""

    @property
    def room(self) -> float:
        """Bytes of all groups' caches, without the prefix that all requests share."""
        return (self.cache.room - self.cache.token * self.shared) * self.cache.groups

    def wanted(self, request: _Request) -> float:
        """Return the bytes that must be free to admit a request."""
        context = request.own + (request.output if self.setup.engine.reserves else request.made)
        return self.cache.of(context)

    def joined(self, request: _Request) -> None:
        """Add a request whose prompt was read to the decoding sequences."""
        left = max(math.ceil((request.output - request.made) / self.setup.yielded), 0)
        heapq.heappush(self.running, (self.step + left, request.number, request, self.step))
        self.promised += request.prompt + request.output
        self.context += request.prompt + request.made

    def grown_bytes(self) -> float:
        """Return the bytes that one step of all decoding sequences adds; 0 if their full length is reserved."""
        if self.setup.engine.reserves:
            return 0.0
        return len(self.running) * self.setup.yielded * self.cache.token

    def held(self, request: _Request, joined: int) -> float:
        """Return the bytes that a decoding sequence holds."""
        if self.setup.engine.reserves:
            return self.cache.of(request.own + request.output)
        return self.cache.of(request.own + request.made - 1 + (self.step - joined) * self.setup.yielded)

    def kept_free(self) -> float:
        """Return the bytes kept free for running answers (``AnswerReserve``); 0 without a reserve."""
        reserve = self.setup.engine.reserve
        if reserve is None or not self.running:
            return 0.0
        share = max(self.hope - reserve.fall * (self.step - self.hoped_at), reserve.least)
        return share * self.cache.token * min(max(self.promised - self.context, 0.0),
                                              float(reserve.longest * len(self.running)))

    def gathers(self) -> bool:
        """Return whether waiting prompts are held back until there are more of them."""
        engine = self.setup.engine
        if not (engine.wait_steps and self.waiting and self.running) or self.reading:
            self.waits_until = -1
            return False
        if self.waits_until < 0:
            self.waits_until = self.step + engine.wait_steps
        if self.step < self.waits_until and sum(each.to_read for each in self.waiting) < engine.wait_tokens:
            return True
        self.waits_until = -1
        return False

    def admit(self) -> tuple[list[PrefillChunk], list[_Request]]:
        """Return pieces of prompts for the next step, and the requests whose prompts end with it."""
        engine, budget = self.setup.engine, self.setup.step_tokens
        if engine.mixing is Mixing.MIXED:
            budget -= len(self.running) * self.setup.drafted
        pieces: list[PrefillChunk] = []
        ended: list[_Request] = []
        if self.gathers():
            return pieces, ended
        kept = self.kept_free()
        while budget > 0:
            if self.reading:
                request = self.reading[0]
            elif self.waiting and len(self.running) + len(ended) < engine.sequences:
                request = self.waiting[0]
                need = self.wanted(request)
                if engine.reserve is not None:
                    kept += self.cache.token * min(request.output - request.made, engine.reserve.longest)
                if self.taken + need + kept > self.room and (self.running or ended):
                    break
                if not engine.splits and request.to_read > budget and pieces:
                    break
                self.waiting.popleft()
                self.taken += need
                self.reading.append(request)
            else:
                break
            # An engine that does not split prompts reads a whole prompt in addition to decoding.
            new = min(request.to_read, budget if engine.splits else self.setup.step_tokens)
            pieces.append(PrefillChunk(1, new, request.read))
            request.read += new
            budget -= new
            if request.to_read == 0:
                self.reading.pop(0)
                ended.append(request)
        return pieces, ended

    def throw_out(self) -> None:
        """Evict decoding sequences, latest arrival first, until a step has room."""
        while self.taken + self.grown_bytes() > self.room and len(self.running) > 1:
            last = max(self.running, key=lambda each: (each[2].arrival, each[1]))
            self.running.remove(last)
            heapq.heapify(self.running)
            self.leave(last)
            request = last[2]
            request.made += round((self.step - last[3]) * self.setup.yielded)
            request.made = min(request.made, request.output - 1)
            request.read = request.cached
            self.waiting.appendleft(request)
            self.preempted += 1
            if (reserve := self.setup.engine.reserve) is not None:
                # The share that the remaining answers have made so far, plus a few steps.
                asked = sum(each[2].output for each in self.running)
                made = self.context - self.promised + asked
                self.hope, self.hoped_at = min((made + reserve.ahead * len(self.running)) / asked, 1.0), self.step

    def leave(self, each: tuple[int, int, _Request, int]) -> None:
        """Free the cache that a decoding sequence holds."""
        _, _, request, joined = each
        self.taken -= self.held(request, joined)
        self.promised -= request.prompt + request.output
        self.context -= request.prompt + request.made + (self.step - joined) * self.setup.yielded

    def alike(self, until: float) -> int:
        """Return how many decoding steps are equal until the next event, which may come at time ``until``, µs."""
        steps = max(self.running[0][0] - self.step, 1)
        if self.waits_until >= 0:
            steps = min(steps, max(self.waits_until - self.step, 1))
        if (grown := self.grown_bytes()) > 0:
            steps = min(steps, max(int((self.room - self.taken) // grown), 1))
        if math.isfinite(until):
            one = self.surface.us(len(self.running), self.context / len(self.running))
            steps = min(steps, max(math.ceil((until - self.clock) / one), 1))
        return steps

    def advance(self, steps: int, pieces: list[PrefillChunk], finished: int, *, decodes: bool) -> None:
        """Advance the clock by steps."""
        number = len(self.running) if decodes else 0
        grown = self.setup.yielded * number
        context = (self.context + grown * (steps - 1) / 2) / number if number else 0.0
        us = steps * self.surface.us(number, context, pieces, finished)
        self.clock += us
        self.busy += us
        self.decoding_us += us * len(self.running)
        if decodes:
            self.step += steps
            self.taken += steps * self.grown_bytes()
            self.context += steps * grown


def simulate_serving(load: Requests, setup: ServingSetup, surface: StepTimes, cache: CacheAccount) -> ServedRequests:
    """Simulate the requests of a load on one replica.

    Raises:
        ServingError: a request's cache alone does not fit.
    """
    arrivals, prompts, outputs = load.drawn()
    n = len(arrivals)
    largest = int(np.argmax(prompts + outputs))
    if cache.of(float(prompts[largest] + outputs[largest])) > max(cache.room, 0.0):
        cache.check(1, int(prompts[largest] + outputs[largest]), "The model")
    cached = np.minimum(load.cached, prompts - 1)
    requests = [_Request(i, float(arrivals[i]), int(prompts[i]), int(outputs[i]), int(cached[i]), read=int(cached[i]))
                for i in range(n)]
    server = _Server(setup, surface, cache, int(cached.max()))
    if setup.engine.reserve is not None:
        server.hope = setup.engine.reserve.first
    front = _Front(setup.engine.request_us)
    sent = min(load.concurrency, n) if load.concurrency else n
    for request in requests[:sent]:
        front.send(request, request.arrival)
    ends: Float64 = np.full(n, math.nan)
    finished = events = 0
    while finished < n:
        events += 1
        if events > MOST_STEPS:
            raise ServingError("The simulation of this load takes too many steps; give fewer requests, or shorter "
                               "ones.")
        server.waiting.extend(front.arrived(server.clock))
        if not (server.waiting or server.reading or server.running):
            server.clock = front.next_us
            continue
        server.throw_out()
        pieces, ended = server.admit()
        mixed = setup.engine.mixing is Mixing.MIXED
        decodes = bool(server.running) and (mixed or not pieces)
        if pieces:
            server.advance(1, pieces, len(ended), decodes=decodes)
        else:
            server.advance(server.alike(front.next_us), [], 0, decodes=True)
        answered = 0
        while server.running and server.running[0][0] <= server.step:
            each = heapq.heappop(server.running)
            server.leave(each)
            ends[each[2].number] = server.clock
            answered += 1
        for request in ended:
            if not math.isfinite(request.first):
                request.first = server.clock
            request.made += 1
            if request.made >= request.output:
                ends[request.number] = server.clock
                server.taken -= server.wanted(request) if setup.engine.reserves else cache.of(
                    request.own + request.made - 1)
                answered += 1
                continue
            server.joined(request)
        finished += answered
        if load.concurrency:
            for request in requests[sent:sent + answered]:
                front.send(request, server.clock + setup.engine.reply_us)
            sent = min(sent + answered, n)
    arrived = np.array([request.arrival for request in requests])
    first = np.array([request.first for request in requests])
    tokens = np.maximum(outputs - 1, 0).astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        tpot = np.where(tokens > 0, (ends - first) / tokens, math.nan)
    # A client sees all tokens of the first message at once; later tokens come evenly.
    held = np.minimum(setup.engine.first_tokens - 1, tokens) * np.nan_to_num(tpot)
    first = first + held
    tpot = tpot - held / np.maximum(tokens, 1.0)
    extra = setup.engine.reply_us
    kept = slice(load.warm_up, None)
    span = max(server.clock - float(arrived.min()), 1e-9)
    return ServedRequests((first - arrived + extra)[kept], tpot[kept], (ends - arrived + extra)[kept], arrived[kept],
                          prompts[kept], outputs[kept], float(ends[kept].max() - arrived[kept].min()),
                          server.busy / span, server.preempted, server.decoding_us / span, events)
