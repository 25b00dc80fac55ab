"""The plan of a campaign: a TOML file of workload captures and micro-benchmarks, read and checked. Imports no torch.

    name = "smoke"
    description = "…"
    device = "cpu"              # or "cuda"

    parts = 2                   # runs that the items are cut into, in order
    minutes = 9                 # most minutes of each run, by the estimates below

    [[workload]]                # captures: tracer.workloads
    workload = "llama"
    preset = "real"             # start from this preset; the settings below replace its own
    priority = 1                # 1 runs first

    columns = ["batch", "seq"]  # settings that change together, a row for each configuration
    rows = [[1, 128], [8, 2048]]
    product = { dtype = ["bf16", "tf32"] }  # times every combination of these

    timed = 30                  # unprofiled steps, then `steps` profiled ones
    seconds = 8                 # expected time of one capture, with its process and files

    [[kernel]]                  # micro-benchmarks: tracer.campaign.families
    family = "gemm"
    draw = { m = [16, 8192, 16], n = [64, 8192, 64], k = [64, 8192, 64] }  # least, most, multiple of

    count = 40                  # log-uniform random sizes, the same each time
    product = { dtype = ["bf16"], layout = ["nt", "nn"] }
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from tracer.errors import ForetraceError
from tracer.input_file import DecodeError, from_toml, read_input


class CampaignError(ForetraceError):
    """A plan has a mistake, or a campaign cannot run or be resumed."""


class CampaignBusyError(CampaignError):
    """Another process writes to the campaign's directory."""


Positive = Annotated[float, msgspec.Meta(gt=0)]
Count = Annotated[int, msgspec.Meta(ge=1)]
Value = str | int | float | bool


class Grid(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Combinations of settings: each row of ``rows`` (values of ``columns``) with each combination of ``product``.

    ``draw`` adds ``count`` rows of log-uniform random sizes: name → (least, most, multiple of).
    """

    priority: Count = 1
    columns: list[str] = []
    rows: list[list[Value]] = []
    draw: dict[str, tuple[int, int, int]] = {}
    count: int = 0
    product: dict[str, list[Value]] = {}


class WorkloadEntry(Grid, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Captures of one workload. ``warmup``, ``timed``, ``steps``, … are options of ``tracer.capture``."""

    workload: str
    preset: str = "default"
    warmup: Annotated[int, msgspec.Meta(ge=0)] = 5
    timed: Count = 30
    steps: Count = 3
    cycles: Count = 1
    execution_trace: Literal["apart", "all", "none"] = "apart"
    seconds: Positive = 8.0


class KernelEntry(Grid, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Micro-benchmarks of one family."""

    family: str
    seconds: Positive = 0.3


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A campaign's recordings as listed in its file; ``tracer.campaign.expand`` makes items of them."""

    name: str
    description: str
    device: Literal["cpu", "cuda"]
    parts: Count = 1
    minutes: Positive = 9.0
    threads: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Threads of torch on the CPU; 0 means torch's own choice."""
    workload: list[WorkloadEntry] = []
    kernel: list[KernelEntry] = []


def packaged_plans() -> dict[str, Path]:
    """Return the plans in the package, by name."""
    folder = Path(__file__).resolve().parents[1] / "plans"
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def read_plan(plan: str | Path) -> Plan:
    """Read and check a plan: one of the package, given by name, or a TOML file. ``expand`` checks its settings.

    Raises:
        CampaignError: it does not exist, is no TOML, or has an unknown or missing key or a value of the wrong type.
    """
    known = packaged_plans()
    path = known.get(str(plan), Path(plan))
    try:
        text = read_input(path)
    except OSError as error:
        raise CampaignError(f"The plan {plan} cannot be read ({error.strerror or error}); give a TOML file, or one of "
                            f"the package's plans: {', '.join(known)}.") from error
    try:
        found = msgspec.convert(from_toml(text), Plan)
    except DecodeError as error:
        raise CampaignError(f"The plan {plan} cannot be read: {error}.") from error
    except msgspec.ValidationError as error:
        raise CampaignError(f"The plan {plan} cannot be used: {_explained(error)}") from error
    if not found.workload and not found.kernel:
        raise CampaignError(f"The plan {plan} has nothing to record: give it a [[workload]] or a [[kernel]].")
    return found


def _explained(error: msgspec.ValidationError) -> str:
    """Return msgspec's sentence with the valid keys."""
    text = str(error)
    what, _, where = text.partition(" - at ")
    place = where.strip("`").removeprefix("$.") or "the top"
    kind: type[Grid] | type[Plan] = (
        WorkloadEntry if place.startswith("workload[") else KernelEntry if place.startswith("kernel[") else Plan)
    if "unknown field" in what:
        what = what.replace("Object contains unknown field", "there is no key")
        return f"{what} at {place}; the keys are {', '.join(kind.__struct_fields__)}."
    return f"{what[:1].lower()}{what[1:]} at {place}."


def combinations(entry: Grid, where: str) -> list[dict[str, Any]]:
    """Return every configuration of an entry, rows first, in file order.

    Args:
        where: name of the entry in errors.

    Raises:
        CampaignError: a row's length differs from that of columns, a list is empty, or a setting is named twice.
    """
    for row in entry.rows:
        if len(row) != len(entry.columns):
            raise CampaignError(f"{where}: the row {row} has {len(row)} values for {len(entry.columns)} columns "
                                f"({', '.join(entry.columns) or 'none'}).")
    if entry.columns and not entry.rows:
        raise CampaignError(f"{where}: there are columns ({', '.join(entry.columns)}) and no rows.")
    if bool(entry.draw) != (entry.count > 0):
        raise CampaignError(f"{where}: draw and count go together: name the sizes to draw, and how many.")
    if entry.rows and entry.draw:
        raise CampaignError(f"{where}: give rows or draw, not both; write two entries.")
    named = [*entry.columns, *entry.draw, *entry.product]
    for name in named:
        if named.count(name) > 1:
            raise CampaignError(f"{where}: {name!r} is set twice; name it in one of columns, draw and product.")
    for name, values in entry.product.items():
        if not values:
            raise CampaignError(f"{where}: the list of {name!r} is empty.")
    rows = [dict(zip(entry.columns, row, strict=True)) for row in entry.rows] or _drawn(entry, where) or [{}]
    products = [dict(zip(entry.product, values, strict=True)) for values in itertools.product(*entry.product.values())]
    return [{**row, **values} for row in rows for values in products]


def _drawn(entry: Grid, where: str) -> list[dict[str, Any]]:
    """Return log-uniform sizes, equal for equal entries: the seed consists of their names and bounds."""
    for name, (low, high, unit) in entry.draw.items():
        if not 1 <= unit <= low <= high or low % unit:
            raise CampaignError(f"{where}: draw.{name} = [{low}, {high}, {unit}] must be [least, most, multiple of], "
                                "the least a multiple too.")
    generator = random.Random(repr(sorted(entry.draw.items())))
    return [{name: max(low, min(high, round(low * (high / low) ** generator.random() / unit) * unit))
             for name, (low, high, unit) in entry.draw.items()} for _ in range(entry.count)]


def spread(count: int) -> list[int]:
    """Return the numbers below ``count``, ordered so that the first few cover the range: ends, middle, quarters, …

    >>> spread(6)
    [0, 5, 2, 1, 3, 4]
    """
    order = [0, count - 1] if count > 1 else list(range(count))
    parts = 2
    while len(order) < count:
        order += [number * (count - 1) // parts for number in range(1, parts)]
        order = list(dict.fromkeys(order))
        parts *= 2
        if parts > 2 * count:
            order = list(dict.fromkeys([*order, *range(count)]))
    return order
