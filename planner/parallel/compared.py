"""``compare``: how much each setting contributes to the difference between the steps of two recipes.

A recipe is a TOML file with options of ``foretrace plan``; the options that it leaves out have their defaults:

    source = "llama"
    preset = "70b"
    gpus = 64
    device = "h100-sxm"
    parallel = "dp=4,tp=4,pp=4,microbatch=1,microbatches=32,sharding=1,sequence_parallel"
    set = ["seq=8192"]

The differing settings are changed one after another, in every possible order. The mean change of the step by a setting
is its part: the Shapley value over orders whose recipes are all possible (Shapley, 1953). For orders under a
precedence see Faigle and Kern (1992). Parts depend on no order and add up to the difference. Replicas and
micro-batches follow from GPUs, the sequences of a step and the other sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from kernel_models.device import find_device
from planner.parallel.decoder import read_decoder
from planner.parallel.estimate import Estimate
from planner.parallel.layer_costs import LayerCosts
from planner.parallel.memory import fullest_of
from planner.parallel.planning import PlanJob, PlanRequest, job_of
from planner.parallel.search import parts_of, unsure_us
from tracer.input_file import DecodeError, from_toml, read_input, why_unopened
from tracer.parallel_plan import ParallelPlan, PlanError, said
from tracer.shape_only.errors import ShapeOnlyError

MOST_EXACT = 8
"""Most settings for which every order is computed: 256 recipes."""
ORDERS, SEED = 16, 7
"""For more settings: number of random orders, each also used in reverse, and their seed."""
KEYS: Mapping[str, type | tuple[type, ...]] = {
    "source": str, "preset": str, "gpus": int, "device": str, "topology": str, "set": list, "global_batch": int,
    "parallel": (str, dict), "framework": str, "linears": str, "launch_us": (int, float), "host": (int, float),
    "host_from": str, "comm_profile": str, "comm_choices": str}
"""Keys of a recipe, and the types of their values."""
_FIELDS = {"set": "settings", "parallel": "only"}
"""Keys of a recipe whose field in a request has another name."""
_JOB = {"source": "model", "preset": "model", "device": "device", "topology": "topology", "linears": "linear layers",
        "framework": "framework", "launch_us": "host", "host": "host", "host_from": "host", "comm_profile": "network",
        "comm_choices": "network"}
"""Fields of a request that may differ, and the setting that each is part of."""
_PLAN = {"ep": "experts' ranks", "etp": "experts' ranks", "schedule": "schedule", "chunks": "schedule",
         "sharding": "sharding", "replicate": "sharding", "bucket_mb": "sharding", "recompute": "recomputation",
         "recompute_layers": "recomputation", "recompute_modules": "recomputation", "first_layers": "layers of stages",
         "last_layers": "layers of stages", "embedding_layer": "layers of stages", "loss_layer": "layers of stages",
         "balanced": "layers of stages", "microbatch": "micro-batch"}
"""Fields of a plan that belong to one setting; every other field is a setting of its own name."""
_FOLLOW = ("dp", "microbatches", "lone_ddp")
"""Fields of a plan that follow from others, or change no estimate."""
Settings = Mapping[str, Mapping[str, Any]]
"""A recipe's values by setting, each a field's."""


@dataclass(frozen=True, slots=True)
class SettingCause:
    """A setting that differs, and its part of the difference.

    Attributes:
        setting: its name.
        before, after: its values, as text.
        us: its part of the difference, µs; all parts together are the difference.
        unsure_us: half of its 80% interval, µs.
        alone_us: change of the first recipe's step by this setting alone, µs; ``None`` if impossible.
        last_us: change by this setting after all others have the second recipe's values, µs.
        parts: its part of each of the step's parts (``parts_of``), µs.
    """

    setting: str
    before: str
    after: str
    us: float
    unsure_us: float
    alone_us: float | None
    last_us: float | None
    parts: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class RecipeSide:
    """One of the two recipes: name, step, tokens of a step, memory of its fullest stage and its limit, bytes."""

    name: str
    estimate: Estimate
    tokens: int
    memory: float
    limit: float

    @property
    def tokens_per_gpu_second(self) -> float:
        """Return the tokens that one GPU processes in a second."""
        return self.tokens / self.estimate.plan.world_size / self.estimate.time_us * 1e6


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two recipes, and the causes of their difference, the largest first.

    Attributes:
        exact: every order was computed.
        notes: assumptions.
    """

    first: RecipeSide
    second: RecipeSide
    causes: tuple[SettingCause, ...]
    exact: bool
    notes: tuple[str, ...] = ()

    @property
    def us(self) -> float:
        """By how much the second step is longer, µs."""
        return self.second.estimate.time_us - self.first.estimate.time_us

    @property
    def unsure_us(self) -> float:
        """Half-width of the 80% interval of the steps' difference, µs."""
        return unsure_us(self.first.estimate, self.second.estimate)


def read_recipe(path: str, base: PlanRequest) -> PlanRequest:
    """Return ``base`` with the values of a recipe file, which replace those of ``base``; settings of both apply.

    Args:
        path: a TOML file.
        base: the request of the command's options, for values that the file does not give.

    Raises:
        PlanError: the file cannot be read, has unknown keys or values, or names no model or no plan.
    """
    try:
        said_there = from_toml(read_input(path))
    except OSError as error:
        raise PlanError(why_unopened(path, error)) from None
    except DecodeError as error:
        raise PlanError(f"{path} is no recipe ({error}); write a TOML file with lines such as gpus = 64.") from None
    said_there = {name.replace("-", "_"): value for name, value in said_there.items()}
    for name, value in said_there.items():
        if name not in KEYS:
            raise PlanError(f"{path} says {name}, which no recipe has; known are {', '.join(KEYS)}.")
        if not isinstance(value, KEYS[name]) or isinstance(value, bool):
            raise PlanError(f"{path} has {name} = {value!r}, which is no value of it; write it as the options of "
                            "foretrace plan have it.")
    if isinstance(said_there.get("parallel"), dict):
        said_there["parallel"] = ",".join(f"{name}={str(value).lower()}" for name, value in said_there[
            "parallel"].items())
    values = {_FIELDS.get(name, name): value for name, value in said_there.items()}
    values["settings"] = [*base.settings, *map(str, values.get("settings", ()))]
    request = replace(base, **values)
    if not request.source or request.only is None:
        what, such = ("model", 'source = "llama"') if not request.source else ("plan", 'parallel = "dp=8,tp=4"')
        raise PlanError(f"{path} says no {what}, and neither does the command; add a line such as {such}.")
    if "gpus" not in said_there and base.gpus == 1:
        request = replace(request, gpus=ParallelPlan.parse(request.only).world_size)
    return request


def compare(paths: Sequence[str], base: PlanRequest) -> Comparison:
    """Find the causes of the difference between two recipes' steps.

    Args:
        paths: the two files.
        base: the request for options that both files leave out.

    Raises:
        ForetraceError: a recipe cannot be read, or its plan is not possible.
    """
    recipes = _Recipes(base)
    ends = [recipes.settings_of(read_recipe(path, base)) for path in paths]
    differing = sorted(name for name in ends[0].keys() | ends[1].keys() if ends[0].get(name) != ends[1].get(name))
    first, second = (_side(path, recipes, end) for path, end in zip(paths, ends, strict=True))
    found: dict[int, Estimate | None] = {0: first.estimate, (1 << len(differing)) - 1: second.estimate}

    def step(mask: int) -> Estimate | None:
        if mask not in found:
            found[mask] = recipes.possible({**ends[0], **{name: ends[1].get(name, {}) for i, name in enumerate(
                differing) if mask >> i & 1}})
        return found[mask]

    exact = len(differing) <= MOST_EXACT
    edges = _every_order(len(differing), step) if exact else _some_orders(len(differing), step)
    causes = [_cause(i, name, ends, edges, step, len(differing)) for i, name in enumerate(differing)] if edges or not (
        differing) else _together(differing, ends, first.estimate, second.estimate)
    return Comparison(first, second, tuple(sorted(causes, key=lambda each: -abs(each.us))), exact,
                      tuple(dict.fromkeys(note for end in ends for note in recipes.job(end).notes)))


class _Recipes:
    """Estimates of recipes by their settings. Pieces are traced once for each kind of device."""

    def __init__(self, base: PlanRequest) -> None:
        self._base = base
        self._pieces: dict[tuple[Any, ...], LayerCosts] = {}
        self._jobs: dict[tuple[Any, ...], PlanJob] = {}

    def settings_of(self, request: PlanRequest) -> dict[str, dict[str, Any]]:
        """Return the settings of a request and of its plan."""
        found: dict[str, dict[str, Any]] = {}
        for name, setting in _JOB.items():
            found.setdefault(setting, {})[name] = getattr(request, name)
        for text in request.settings:
            name, _, value = (part.strip() for part in text.partition("="))
            if name != "batch":  # "sequences a step" includes it
                found[f"set {name}"] = {name: value}
        assert request.only is not None
        plan = request.said_plan(request.only, read_decoder(request.source, request.settings, request.preset)[2])
        found["GPUs"] = {"gpus": plan.world_size}
        found["sequences a step"] = {"batch": plan.global_batch}
        for name in (field.name for field in fields(plan) if field.name not in _FOLLOW):
            size: Any = plan.samples if name == "microbatch" else getattr(plan, name)
            found.setdefault(_PLAN.get(name, name), {})[name] = size
        return found

    def job(self, settings: Settings) -> PlanJob:
        """Return the job of settings without their plan."""
        values = {name: settings[setting][name] for name, setting in _JOB.items()}
        texts = tuple(f"{name}={value}" for setting, each in sorted(settings.items()) if setting.startswith("set ")
                      for name, value in each.items())
        gpus = settings["GPUs"]["gpus"]
        key = (*values.values(), texts, gpus)
        if key not in self._jobs:
            request = replace(self._base, **values, settings=texts, gpus=gpus, only=None, global_batch=None)
            self._jobs[key] = job_of(replace(request, pieces=self._pieces_of(request)))
        return self._jobs[key]

    def _pieces_of(self, request: PlanRequest) -> LayerCosts:
        key = request.device, request.runs.name
        if key not in self._pieces:
            spec = find_device(request.device)
            like = next((each for each in self._pieces.values() if each.runs_as(spec)), None)
            measured = request.profile if request.device == self._base.device else None  # for this device only
            self._pieces[key] = LayerCosts(request.technology.device(spec), measured, like, request.runs)
        return self._pieces[key]

    def plan(self, settings: Settings) -> ParallelPlan:
        """Return the plan of settings. Raises ``PlanError`` if it is not possible."""
        values = {name: value for setting, each in settings.items() if setting not in ("GPUs", "sequences a step")
                  and not setting.startswith("set ") for name, value in each.items() if name not in _JOB}
        gpus, batch = settings["GPUs"]["gpus"], settings["sequences a step"]["batch"]
        dp, left = divmod(gpus, values["tp"] * values["pp"] * values["cp"])
        passes, over = divmod(batch, max(dp, 1) * values["microbatch"])
        if left or over or not dp or not passes:
            raise PlanError(f"{gpus} GPUs and {batch} sequences do not divide by these sizes.")
        return self.job(settings).request.runs.planned(ParallelPlan(dp=dp, microbatches=passes, **values))

    def possible(self, settings: Settings) -> Estimate | None:
        """Return the estimate for settings; ``None`` if they are not possible together."""
        try:
            return self.job(settings).estimate(self.plan(settings))
        except (PlanError, ShapeOnlyError):
            return None


def _side(path: str, recipes: _Recipes, settings: Settings) -> RecipeSide:
    job, plan = recipes.job(settings), recipes.plan(settings)
    memory = fullest_of(plan, job.shape, job.pieces).account.total
    return RecipeSide(Path(path).name, job.estimate(plan), plan.global_batch * job.shape.seq, memory,
                      job.request.memory_limit or job.pieces.device.memory_gb * 1e9)


Edges = Mapping[tuple[int, int], float]
"""By (mask, i): share of all orders in which exactly the settings of a bit mask are changed before setting i."""


def _every_order(count: int, step: Callable[[int], Estimate | None]) -> Edges:
    """Return by (mask, i) the share of the possible orders in which the settings of the mask change just before i."""
    full = (1 << count) - 1

    @cache
    def onward(mask: int) -> int:
        """Return in how many possible orders the settings outside a mask can change."""
        return 1 if mask == full else sum(onward(mask | 1 << i) for i in _left(mask, count)
                                          if step(mask | 1 << i) is not None)

    total = onward(0)
    here, found = {0: 1}, {}
    while total and here:
        following: dict[int, int] = {}
        for mask, ways in here.items():
            for i in _left(mask, count):
                to = mask | 1 << i
                if step(to) is not None and onward(to):
                    found[mask, i] = ways * onward(to) / total
                    following[to] = following.get(to, 0) + ways
        here = following
    return found


def _some_orders(count: int, step: Callable[[int], Estimate | None]) -> Edges:
    """Return ``_every_order``'s shares from random orders; a change that is not possible yet is postponed."""
    random, found, ended = np.random.default_rng(SEED), dict[tuple[int, int], float](), 0
    drawn = [random.permutation(count).tolist() for _ in range(ORDERS)]
    for order in [*drawn, *(each[::-1] for each in drawn)]:
        mask, path, left = 0, [], list(order)
        while left:
            i = next((i for i in left if step(mask | 1 << i) is not None), None)
            if i is None:
                break
            path.append((mask, i))
            mask |= 1 << i
            left.remove(i)
        if not left:
            ended += 1
            for edge in path:
                found[edge] = found.get(edge, 0.0) + 1.0
    return {edge: times / ended for edge, times in found.items()}


def _left(mask: int, count: int) -> Iterator[int]:
    return (i for i in range(count) if not mask >> i & 1)


def _cause(i: int, name: str, ends: Sequence[Settings], edges: Edges, step: Callable[[int], Estimate | None],
           count: int) -> SettingCause:
    us = unsure = 0.0
    parts: dict[str, float] = {}
    for (mask, which), share in edges.items():
        if which != i:
            continue
        before, after = step(mask), step(mask | 1 << i)
        assert before is not None
        assert after is not None
        us += share * (after.time_us - before.time_us)
        unsure += share * unsure_us(before, after)
        one, two = parts_of(before), parts_of(after)
        for part in one:
            parts[part] = parts.get(part, 0.0) + share * (two[part] - one[part])
    full = (1 << count) - 1
    alone, last = _moved(step(0), step(1 << i)), _moved(step(full & ~(1 << i)), step(full))
    return SettingCause(name, *_values(name, ends), us, unsure, alone, last, parts)


def _moved(before: Estimate | None, after: Estimate | None) -> float | None:
    return None if before is None or after is None else after.time_us - before.time_us


def _together(differing: Sequence[str], ends: Sequence[Settings], first: Estimate, second: Estimate
              ) -> list[SettingCause]:
    """Return, as a single cause, settings that can only be changed together."""
    us, one, two = second.time_us - first.time_us, parts_of(first), parts_of(second)
    before, after = (" ".join(texts) for texts in zip(*(_values(name, ends) for name in differing), strict=True))
    return [SettingCause(" with ".join(differing), before, after, us, unsure_us(first, second), us, us,
                         {part: two[part] - one[part] for part in one})]


def _values(name: str, ends: Sequence[Settings]) -> tuple[str, str]:
    """Return a setting's values in both recipes as text, only for fields that differ."""
    first, second = (end.get(name, {}) for end in ends)
    own = [field for field in {**first, **second} if first.get(field) != second.get(field)]
    return _shown({field: first.get(field) for field in own}), _shown({field: second.get(field) for field in own})


def _shown(values: Mapping[str, Any]) -> str:
    """Return a setting's values as text; of several values, empty ones are left out."""
    if len(values) == 1:
        (value,) = values.values()
        if isinstance(value, bool):
            return "on" if value else "off"
        return "–" if value in (None, "", ()) else str(said(value))
    return " ".join(str(said(value)) if isinstance(value, (str, Enum)) else f"{name}={said(value)}"
                    for name, value in values.items() if value not in (None, "", (), False)) or "–"
