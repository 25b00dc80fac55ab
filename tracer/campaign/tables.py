"""The micro-benchmarks' tables: one Parquet file for each family, written in batches and merged at a run's end."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tracer.campaign.families import FAMILIES, CampaignFamily
from tracer.campaign.plan import CampaignError
from tracer.errors import reason_of
from tracer.input_file import open_input
from tracer.lazy import parquet, pyarrow
from tracer.table_input import read_parquet

if TYPE_CHECKING:
    import pandas

KERNELS = "kernels"
"""Folder of the tables in a campaign's directory."""
PART_ENDING = ".part.parquet"
WARM = "warm"
"""The variant whose data may be in L2. Later visits of a benchmark have the variants ``warm 2``, ``warm 3``, …"""

_COMMON: dict[str, tuple[str, str]] = {
    "id": ("string", "the item; its line of items.jsonl has the rest"),
    "session": ("int32", "which of campaign.json's sessions measured it"),
    "split": ("string", "fit or held-out, by the shape group"),
}
_TIMES = ("runs", "min_us", "p10_us", "p25_us", "p50_us", "p75_us", "p90_us", "event_overhead_us")
"""Columns that every visit measures."""
_MEASURED: dict[str, tuple[str, str]] = {
    "variant": ("string", "warm (data may be in L2; \"warm 2\" at its second visit), cold (L2 flushed "
                "before each run), or what was measured"),
    "runs": ("int32", "timed runs"),
    "min_us": ("float64", "fastest run, microseconds between two events around it"),
    "p10_us": ("float64", "10th percentile of the runs, microseconds"),
    "p25_us": ("float64", "25th percentile, microseconds"),
    "p50_us": ("float64", "median, microseconds (overheads: the variant `launches` is a count)"),
    "p75_us": ("float64", "75th percentile, microseconds"),
    "p90_us": ("float64", "90th percentile, microseconds"),
    "flops": ("float64", "floating-point operations of one run"),
    "bytes": ("float64", "fewest bytes one run moves: inputs read once, outputs written once"),
    "kernels": ("list<string>", "kernels of one run in order, each once (CPU: outermost operations); null if unseen"),
    "kernel_count": ("float64", "kernels of one run"),
    "kernel_us": ("float64", "the kernels' own time of one run together, by the profiler, warm"),
    "event_overhead_us": ("float64", "median of an empty pair of events, contained in the times"),
    "sm_clock_mhz": ("int32", "SM clock right after the runs; null where it cannot be read"),
}


def warm_variant(visit: int) -> str:
    """Return the name of a visit's warm variant; visits count from 1."""
    return WARM if visit <= 1 else f"{WARM} {visit}"


def quickest_visits(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Return one warm row for each benchmark, with the times of its fastest visit (by the tenth percentile).

    Other values (kernels, bytes) are those of the first visit. A benchmark without a row of its first visit is left
    out; one without any tenth percentile has no times.
    """
    first = frame[frame.variant == WARM]
    visits = frame[frame.variant.str.match(rf"{WARM}( \d+)?$")]
    if len(visits) == len(first):
        return first
    timed = visits[visits.p10_us.notna()]
    quickest = timed.loc[timed.groupby("id").p10_us.idxmin()].set_index("id")
    found = first.copy()
    for name in _TIMES:
        found[name] = quickest[name].reindex(found.id).to_numpy()
    return found


def describe(family: CampaignFamily) -> dict[str, tuple[str, str]]:
    """Return the columns of a family's table: name → (type, description)."""
    return {
        **_COMMON,
        **dict.fromkeys(family.sizes, ("int64", "size")),
        **{name: ("bool" if isinstance(values[0], bool) else "string",
                  f"one of {', '.join(str(value).lower() for value in values)}")
           for name, values in family.choices.items()},
        **_MEASURED,
    }


def write_part(folder: Path, scratch: Path, family: str, number: str, rows: list[dict[str, Any]]) -> Path:
    """Write a batch of rows as a separate file, atomically."""
    return _write(pyarrow.Table.from_pylist(rows, schema=_schema(FAMILIES[family])), scratch,
                  folder / f"{family}.{number}{PART_ENDING}")


def merge_parts(folder: Path, scratch: Path) -> None:
    """Merge each family's parts into its table. If the process is killed at any moment, all rows stay readable.

    Rows of an item that was measured again replace the older rows. A part that cannot be read is left unchanged.
    """
    for family in sorted({path.name.partition(".")[0] for path in folder.glob(f"*{PART_ENDING}")} & set(FAMILIES)):
        parts = _parts(folder, family)
        table = _read(folder, family)
        _write(table, scratch, folder / f"{family}.parquet")
        for path in parts:
            path.unlink()


def read_kernels(out: str | os.PathLike[str], family: str) -> pandas.DataFrame:
    """Return the rows of a family in a campaign's directory, merged or not; empty if it has none. See ``describe``.

    Raises:
        CampaignError: there is no such family, or a file is damaged.
    """
    if family not in FAMILIES:
        raise CampaignError(f"There is no family {family!r}; choose one of {', '.join(FAMILIES)}.")
    return _read(Path(out) / KERNELS, family).to_pandas()


def _parts(folder: Path, family: str) -> list[Path]:
    return sorted(folder.glob(f"{family}.*{PART_ENDING}"))


def _read(folder: Path, family: str) -> pyarrow.Table:
    schema = _schema(FAMILIES[family])
    files = [folder / f"{family}.parquet", *_parts(folder, family)]
    try:
        # From the open file: a path would be searched for partition=value folders.
        tables = [_content(path).select(schema.names).cast(schema)
                  for path in files if path.exists()]
    except (OSError, KeyError, ValueError) as error:
        raise CampaignError(f"The table of {family} in {folder} cannot be read ({reason_of(error)}); remove the "
                            "damaged file and measure again with --resume.") from error
    merged = pyarrow.concat_tables(tables) if tables else schema.empty_table()
    keys = list(zip(merged["id"].to_pylist(), merged["variant"].to_pylist(), strict=True))
    last = {key: row for row, key in enumerate(keys)}
    return merged.take(sorted(last.values())) if len(last) < len(keys) else merged


def _content(path: Path) -> pyarrow.Table:
    with open_input(path) as stream:
        return read_parquet(stream)


def _schema(family: CampaignFamily) -> pyarrow.Schema:
    types = {"string": pyarrow.string(), "int32": pyarrow.int32(), "int64": pyarrow.int64(), "bool": pyarrow.bool_(),
             "float64": pyarrow.float64(), "list<string>": pyarrow.list_(pyarrow.string())}
    fields: Iterable[pyarrow.Field] = (
        pyarrow.field(name, types[kind], metadata={"description": text})
        for name, (kind, text) in describe(family).items())
    return pyarrow.schema(fields)


def _write(table: pyarrow.Table, scratch: Path, target: Path) -> Path:
    temporary = scratch / target.name
    target.parent.mkdir(exist_ok=True)
    parquet.write_table(table, temporary, compression="zstd")
    os.replace(temporary, target)
    return target
