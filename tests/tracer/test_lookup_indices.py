"""Indices from files and laws, as ``--indices`` takes them: three layouts tell the same, bad ones are one sentence."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import csv, parquet

from tracer.lookup_data.indices import counted, read_indices
from tracer.lookup_data.tables import EmbeddingTable, TableError
from tracer.table_input import TableInputError

BAGS = {"ads": [[0, 0, 0], [5], [0, 7]], "users": [[1], [2], []]}
"""Look-ups of three samples in two tables: of ads row 0 four times, 5 and 7 once; of users two rows."""
TABLES = [EmbeddingTable("ads", 10, 4), EmbeddingTable("users", 100, 8)]


FLAT = [index for bags in BAGS.values() for bag in bags for index in bag]
LENGTHS = [[len(bag) for bag in bags] for bags in BAGS.values()]
BATCH = {"indices": FLAT, "offsets": [0, *np.cumsum(LENGTHS).tolist()], "lengths": LENGTHS}
"""The published layout."""
LONG = [(name, sample, index) for name, bags in BAGS.items() for sample, bag in enumerate(bags) for index in bag]
COLUMNS = {
    "long": dict(zip(("table", "sample", "index"), zip(*LONG, strict=True), strict=True)),
    "wide": {"ads": BAGS["ads"], "users": [bag[0] if bag else None for bag in BAGS["users"]]},
    "batch": {name: [each] for name, each in BATCH.items()},
    "rows": {"table": list(BAGS), "indices": [[i for bag in bags for i in bag] for bags in BAGS.values()],
             "lengths": LENGTHS}}


def written(path: Path, layout: str) -> str:
    target = path / layout.replace("-", ".")
    if layout == "wide.csv":
        lines = [",".join(" ".join(map(str, bag)) for bag in bags) for bags in zip(*BAGS.values(), strict=True)]
        target.write_text("\n".join(["ads,users", *lines]) + "\n")
    elif layout == "batch.pt-gz":
        torch = pytest.importorskip("torch")
        plain = target.with_suffix("")
        torch.save(tuple(torch.tensor(each) for each in BATCH.values()), plain)
        target.write_bytes(gzip.compress(plain.read_bytes()))
    else:
        table = pyarrow.table(COLUMNS[layout.partition(".")[0]])
        (csv.write_csv if layout.endswith(".csv") else parquet.write_table)(table, target)
    return str(target)


@pytest.mark.parametrize("layout", ["long.parquet", "wide.parquet", "batch.parquet", "rows.parquet", "long.csv",
                                    "wide.csv", "batch.pt-gz"])
def test_layouts_tell_the_same(tmp_path: Path, layout: str) -> None:
    ads, users = read_indices(written(tmp_path, layout)).of(TABLES)
    assert (ads.bag, ads.longest_bag, ads.unique, ads.reuse_lookups) == (2.0, 3, 3, 6)
    assert ads.reuse[:4] == pytest.approx((2 / 6, 0, 4 / 6, 0))
    assert ads.bag_quantiles[1] == 2.0
    assert (users.bag, users.longest_bag, users.unique) == (pytest.approx(2 / 3), 1, 2)
    assert users.reuse[0] == 1.0
    assert (ads.rows, ads.columns) == (10, 4)


def test_a_law_is_of_every_table_and_forgets_what_was_counted(tmp_path: Path) -> None:
    found = read_indices("zipf:1.05").of(read_indices(written(tmp_path, "long.parquet")).of(TABLES))
    assert [table.law_skew() for table in found] == [1.05, 1.05]
    assert found[0].bag == 2.0


def test_a_recorded_batch_scales_to_others() -> None:
    weights = np.arange(1, 1001) ** -1.05
    draws = np.random.default_rng(0).choice(1000, size=40_000, p=weights / weights.sum())
    part = counted(EmbeddingTable("t", 1000, 8), draws[:4000], np.full(400, 10))
    assert part.distinct(4000) == pytest.approx(len(np.unique(draws)), rel=0.05)
    assert part.distinct(4000) < 4000 * 10 / 4


@pytest.mark.parametrize(("text", "message"), [
    ("zipf:", "is no Zipf law"), ("zipf:-1", "is no Zipf law"), ("zipf:nan", "is no Zipf law"),
    ("zipf:9", "is no Zipf law"), ("nothing.parquet", "There is no file"), ("uniform", "There is no file"),
])
def test_bad_laws_and_names(text: str, message: str) -> None:
    with pytest.raises((TableError, TableInputError), match=message):
        read_indices(text)


@pytest.mark.parametrize(("name", "content", "message"), [
    ("a.csv", b"", "cannot be read"), ("a.csv", b"a," * 20_000 + b"\n1", "20,000 columns"),
    ("a.parquet", b"PAR1", "cannot be read"), ("a.pt", b"PK\3\4", "no file of plain"),
    ("a.txt", b"1", "its name ends in none"), ("a.csv.gz", b"plain", "cannot be read"),
    ("a.csv", b"table,sample,index\nads,0,-1\n", "rows count from 0"),
    ("a.csv", b"table,sample,index\nads,0,1.5\n", "something else than whole numbers"),
    ("a.csv", b"table,sample,index\nads,0,\n", "something else than whole numbers"),
    ("a.csv", b"ads,users\nx,1\n", "something else than whole numbers"),
    ("a.csv", b"sample,index\n0,1\n1,2\n", "column 'index' and not the others"),
    ("a.csv", b"indices,offsets,lengths\n0,0,1\n1,1,1\n", "each row must have a list|no lists of whole numbers"),
    ("a.csv", b"table,sample,index\n", "no look-ups"), ("a.csv", b"ads,ads\n1,2\n", "two of its columns"),
    ("a.parquet", {"offsets": [0, 3]}, "do not cover"),
    ("a.parquet", {"offsets": [0, 1, 4, 6, 7, 8, 8]}, "do not cover"),
    ("a.parquet", {"lengths": [3, 1, 2, 1, 1, 0]}, "a list for each table"),
    ("a.parquet", {"lengths": [[3, 1, 2], [1, 1]]}, "differ in length"),
    ("a.parquet", {"lengths": [[3.0, 1.0, 2.0], [1.0, 1.0, 0.0]]}, "no lists of whole numbers"),
    ("a.parquet", {"more": [1]}, "column 'more'"),
])
def test_bad_files(tmp_path: Path, name: str, content: bytes | dict[str, Any], message: str) -> None:
    if isinstance(content, bytes):
        (tmp_path / name).write_bytes(content)
    else:
        parquet.write_table(pyarrow.table({key: [each] for key, each in {**BATCH, **content}.items()}),
                            tmp_path / name)
    with pytest.raises(TableInputError, match=message) as raised:
        read_indices(str(tmp_path / name))
    assert "\n" not in str(raised.value)


class Trap:
    """Fails where it is unpickled."""

    def __reduce__(self) -> Any:
        return pytest.fail, ("the file's code was run",)


def test_torch_files_run_no_code(tmp_path: Path) -> None:
    pytest.importorskip("torch").save((Trap(), 1, 2), tmp_path / "a.pt")
    with pytest.raises(TableInputError, match="no file of plain tensors"):
        read_indices(str(tmp_path / "a.pt"))


@pytest.mark.parametrize(("tables", "message"), [
    ([EmbeddingTable(f"t{i}", 10, 4) for i in range(3)], "has indices of 2 tables, and the model looks up 3"),
    ([EmbeddingTable("ads", 5, 4), TABLES[1]], "has 5 rows, and the indices go up to 7"),
    ([TABLES[0], EmbeddingTable("b", 100, 4)], "of table 'ads' and none of 'b'")])
def test_tables_that_do_not_fit(tmp_path: Path, tables: list[EmbeddingTable], message: str) -> None:
    indices = read_indices(written(tmp_path, "long.parquet"))
    with pytest.raises(TableError, match=message):
        indices.of(tables)
    by_order = indices.of([EmbeddingTable("a", 10, 4), EmbeddingTable("b", 100, 4)])
    assert [table.reuse_lookups for table in by_order] == [6, 2]
