"""Files of embedding tables: what is written is read again, what is bad is one sentence with its file and line."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest
from dlrm_parts.tasks import NEUROSHARD_COLUMNS, dreamshard_task, neuroshard_task
from table_files import write_tables

from tracer.lookup_data.files import PUBLISHED_BATCH, read_tables, table_of_published
from tracer.lookup_data.tables import (
    EmbeddingTable,
    TableError,
    distinct_of_histogram,
    histogram_of_zipf,
    reuse_histogram,
)
from tracer.table_input import TableInputError

TABLES = [EmbeddingTable("a", 1000, 64, bag=2.5, longest_bag=9, skew=1.1),
          EmbeddingTable("b, \"quoted\"", 50, 16, dtype="int8", reuse=histogram_of_zipf(300, 50, 0.5),
                         reuse_lookups=300, unique=40, bag_quantiles=(1.0, 2.0, 3.0, 4.0), pooling="mean",
                         weighted=True, optimizer="none", output_dtype="fp16", location="uvm_cached",
                         cache_load_factor=0.5),
          EmbeddingTable("c", 70, 8, dtype="fp16", optimizer="adam", location="uvm")]


@pytest.mark.parametrize("suffix", [".csv", ".parquet", ".json"])
def test_written_tables_are_read_again(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"tables{suffix}"
    write_tables(TABLES, path)
    found = read_tables(path)
    assert [each.name for each in found] == [each.name for each in TABLES]
    np.testing.assert_allclose(found[1].reuse, TABLES[1].reuse)
    assert [replace(each, reuse=()) for each in found] == [replace(each, reuse=()) for each in TABLES]


def test_rows_and_states_are_as_fbgemm_stores_them(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("name,rows,columns,dtype\na,10,128,int8\nb,10,128,int4\nc,10,128,fp16\n")
    tables = read_tables(tmp_path / "t.csv")
    # Scale and bias of fp16 each, padded to 16 bytes: 128 + 4 and 64 + 4.
    assert [table.row_bytes for table in tables] == [144.0, 80.0, 256.0]
    assert [table.trained for table in tables] == [False, False, True]
    with pytest.raises(TableError, match="only looked up"):
        EmbeddingTable("a", 10, 4, dtype="int8")
    table = EmbeddingTable("a", 1000, 64, optimizer="partial_rowwise_adam")
    assert (table.host_weight_bytes, table.host_state_bytes) == (0.0, 0.0)
    far = replace(table, location="uvm")
    assert (far.device_weight_bytes, far.host_weight_bytes, far.device_state_bytes, far.host_state_bytes) == (
        0.0, 256e3, 4e3, 256e3)
    cached = replace(table, location="uvm_cached", cache_load_factor=0.1)
    assert cached.host_weight_bytes == 256e3
    assert cached.device_weight_bytes == 100 * (256 + 16) + 1000 * 4


SHARES = ",".join(["0.5", "0.5"] + ["0"] * 15)


@pytest.mark.parametrize(("name", "text", "reuse"), [
    ("t.toml", '[[tables]]\nname = "x"\nrows = 10\ncolumns = 4\n', ()),
    ("t.csv", f"name,rows,columns,reuse_lookups,{','.join(f'reuse_{i}' for i in range(17))}\nx,10,4,8,{SHARES}\n",
     (0.5, 0.5))])
def test_toml_and_columns_of_reuse(tmp_path: Path, name: str, text: str, reuse: tuple[float, ...]) -> None:
    (tmp_path / name).write_text(text)
    (found,) = read_tables(tmp_path / name)
    assert (found.name, found.rows, found.columns, found.reuse[:2]) == ("x", 10, 4, reuse)


PUBLISHED = f"row,{','.join(f'bin_{i}' for i in range(17))}\n10,1,{','.join(['0'] * 15)},{{}}\n"


@pytest.mark.parametrize(("text", "says"), [
    ("", "is an empty file"),
    ("name,rows,columns\n", "has no tables"),
    ("name,rows,columns\na,10,4\na,20,4\n", "tables 1 and 2 are both called 'a'"),
    ("name,rows,columns\na,10,4\nb,nan,4\n", r"t\.csv, line 3: rows is nan"),
    ("name,rows,columns\na,10,4.5\n", "columns is 4.5, which is no whole number"),
    ("name,rows,columns\na,-10,4\n", "rows is -10"),
    ("name,rows\na,10\n", "it has no columns"),
    ("name,rows,columns,dtyp\na,10,4,fp32\n", "did you mean dtype"),
    ("name,rows,columns,dtype\na,10,4,fp99\n", "dtype 'fp99' is unknown"),
    ("name,rows,columns,location\na,10,4,ssd\n", "location 'ssd' is unknown; known are hbm, uvm, uvm_cached"),
    ("name,rows,columns,cache_load_factor\na,10,4,nan\n", "cache_load_factor is nan"),
    ("name,rows,columns,cache_load_factor\na,10,4,0\n", "above 0, at most 1"),
    ("name,rows,columns,cache_load_factor\na,10,4,1.5\n", "above 0, at most 1"),
    ("name,rows,columns,output_dtype\na,10,4,int8\n", "output_dtype 'int8' is unknown"),
    ("name,rows,columns,dtype,optimizer\na,10,4,int4,adam\n", "rows of int4 are only looked up"),
    ("name,rows,columns,dtype\na,10,5,int4\n", "do not fill whole bytes"),
    ("name,rows,columns,bag\na,10,4,many\n", "bag is 'many', not a number"),
    ("name,rows,columns,bag\na,10,4,1e300\n", r"bag is 1e\+300\. It must be 1e\+09 or less"),
    ("name,rows,columns\na,10,4,5,6\n", "more cells"),
    ("name,rows,columns,weighted\na,10,4,perhaps\n", "weighted is 'perhaps'"),
    ("name,rows,columns,reuse\na,10,4,1 2 3\n", "17 shares"),
    ("name,rows,columns,bag,longest_bag\na,10,4,5,3\n", "no more than the longest"),
    ("name,rows,columns,unique\na,10,4,-1\n", "unique is -1"),
    ("name,rows,columns,unique\na,10,4,11\n", "unique is 11, and there are 10 rows"),
    ("name,rows,columns,unique,reuse_lookups\na,10,4,9,8\n", "unique is 9, and there are 8 look-ups"),
    ("name,rows,columns,reuse_lookups\na,10,4,-3\n", "reuse_lookups is -3"),
    ("name,rows,columns,skew\na,10,4,100\n", "skew is 100. It is the exponent"),
    ("name,rows,columns,bag_quantiles\na,10,4,1 2 nan 4\n", "bag_quantiles are 1, 2, nan, 4"),
    ("name,rows,columns,bag_quantiles\na,10,4,1 3 2 4\n", "none less than the one before"),
    ("name,rows,columns,bag_quantiles\na,10,4,1 2\n", "4 numbers"),
    ("name,row,dim,poolin_factor\na,10,4,2\n", "did you mean pooling_factor"),
    ("name,row,columns\na,10,4\n", "'columns' is no field"),
    ("name,row,dim,bin_0\na,10,4,1\n", "it has no bin_1; the layout has the 17 columns"),
    ("name,row,dtype\na,10,fp99\n", "dtype 'fp99' is unknown"),
    (PUBLISHED.format("nan"), "bin_16 is nan"), (PUBLISHED.format("-1"), "bin_16 is -1")])
def test_a_bad_table_is_one_sentence(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(TableInputError, match=says) as caught:
        read_tables(path)
    assert "\n" not in str(caught.value) and "t.csv" in str(caught.value)


@pytest.mark.parametrize("data", [b"[1, 2]", b"{}", b"[", b"{\"tables\": 3}", b"\xff\xfe"])
def test_a_damaged_document_is_one_sentence(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "t.json").write_bytes(data)
    with pytest.raises(TableInputError, match=r"t\.json"):
        read_tables(tmp_path / "t.json")
    (tmp_path / "t.parquet").write_bytes(data)
    with pytest.raises(TableInputError, match=r"t\.parquet"):
        read_tables(tmp_path / "t.parquet")


def test_published_bins_of_rows_become_shares_of_lookups(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    indices = draw.zipf(1.3, 4 * PUBLISHED_BATCH) % 5000
    _, counts = np.unique(indices, return_counts=True)
    # As DreamShard's tools count: shares of different rows, by how often each is looked up.
    edges = [0, *(2**i for i in range(16)), np.inf]
    bins = [float(((counts > low) & (counts <= high)).sum()) / len(counts)
            for low, high in pairwise(edges)]
    row = {"index": 7, "row": 5000, "dim": 16, "pooling_factor": 4, **{f"bin_{i}": each for i, each in enumerate(bins)}}
    (tmp_path / "table_configs.json").write_bytes(msgspec.json.encode({"tables": [row]}))
    table = read_tables(tmp_path / "table_configs.json")[0]
    assert (table.name, table.rows, table.columns, table.bag) == ("t7", 5000, 16, 4.0)
    # A bin stands for its middle: shares agree to a few hundredths.
    np.testing.assert_allclose(table.reuse, reuse_histogram(indices), atol=0.06)
    assert distinct_of_histogram(len(indices), table.reuse) == pytest.approx(len(counts), rel=0.3)
    assert table_of_published({"row": 10}, "x").columns == 16
    quantized = table_of_published({"row": 10, "dtype": "int8"}, "x")
    assert (quantized.dtype, quantized.trained) == ("int8", False)


def test_tasks_follow_the_published_recipes() -> None:
    task = dreamshard_task(1, 50)
    assert len({table.name for table in task}) == 50 and {table.columns for table in task} == {16}
    assert task == dreamshard_task(1, 50) and task != dreamshard_task(2, 50)
    assert min(table.rows for table in task) >= 100
    other = neuroshard_task(1, 30, 40e9)
    assert {table.columns for table in other} <= set(NEUROSHARD_COLUMNS)
    assert sum(table.weight_bytes for table in other) <= 40e9
    with pytest.raises(TableError, match="hardly ever fits"):
        neuroshard_task(1, 30, 1e3)
