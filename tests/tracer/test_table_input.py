"""Tables of users: what is no table, or another one than its name says, is one sentence with what to do."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pandas as pd
import pytest

from graph_predictor.request.measured import read_steps
from kernel_models.collectives.logs import read_log
from kernel_models.datasets import read_samples
from tracer.errors import ForetraceError, TraceError, cut_text, reason_of
from tracer.output_kind import PROFILE, check_output
from tracer.table_input import FORMATS, TableInputError, place, read_cells, read_frame, read_rows

ROWS = pd.DataFrame({"trace": ["ä.foretrace"], "step_ms": [1.5]})
TEXT = ROWS.to_csv(index=False).encode()
PARQUET = ROWS.to_parquet()


@pytest.mark.parametrize(("name", "content", "said"), [
    ("a.csv", b"", "is an empty file"),
    ("a.parquet", b"", "is an empty file"),
    ("a.csv", b"\n\n", "has no line of column names"),
    ("a.csv", PARQUET, "is named as CSV and holds Parquet; rename it to end with .parquet"),
    ("a.parquet", TEXT, "is named as Parquet and holds text; if it is CSV, rename it"),
    ("a.parquet", b"\x00\xff" * 99, "is named as Parquet and holds something else"),
    ("a.parquet", PARQUET[:-9], "is a damaged Parquet file (its end is missing)"),
    ("a.parquet", PARQUET[:4] + b"x" * 99 + PARQUET[-4:], "is a damaged Parquet file"),
    ("a.csv", gzip.compress(TEXT, mtime=0), "is compressed (gzip); unpack it"),
    ("a.csv", b"PK\x03\x04sheet", "an Excel sheet; save its table as CSV"),
    ("a.parquet", b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    ("a.csv", TEXT.decode().encode("utf-16"), "is no text in UTF-8; save it in UTF-8"),
    ("a.csv", TEXT.decode().encode("latin-1"), "is no text in UTF-8; save it in UTF-8"),
    ("a.csv", TEXT + TEXT * 999 + b"\xff,1\n", "is no text in UTF-8; save it in UTF-8"),
    ("a.csv", TEXT.replace(b",", b";"), "separates its columns by semicolons"),
    ("a.csv", b"a,b\n1,2,3\n4,5,6,7\n", "line 3 has 4 fields where those before have 3"),
    ("a.csv", b"a,b\n1,2,\n4,5,\n", "line 2: it has more cells than the first line has names"),
    ("a.csv", b'a,b\n"1,2\n', "a quotation mark is opened in line 2 and never closed"),
    ("a.txt", TEXT, "give a file whose name ends with .csv or .parquet"),
    ("a", PARQUET, "(it holds Parquet: name it .parquet)"),
])
def test_what_is_no_table_is_one_sentence(name: str, content: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(TableInputError) as error:
        read_frame(path)
    sentence = str(error.value)
    assert said in sentence and sentence.startswith(str(path)) and sentence.endswith("."), sentence
    assert "\n" not in sentence and "Errno" not in sentence and "codec" not in sentence, sentence


@pytest.mark.parametrize(("name", "said"), [
    ("absent.csv", "does not exist; check the path"), ("no/absent.csv", "does not exist"),
    ("absent.parquet", "does not exist; check the path"), ("file.csv/a.csv", "does not exist"),
    ("folder.csv", "is a directory, not a file"), ("link.csv", "leads to nothing"),
    ("pipe.csv", "is a pipe or a device, not a file"), ("nosuch://host/a.csv", "cannot be fetched")])
def test_what_lies_there_is_said_by_every_reader_of_tables(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / "folder.csv").mkdir()
    (tmp_path / "link.csv").symlink_to(tmp_path / "nowhere")
    (tmp_path / "file.csv").write_bytes(TEXT)
    os.mkfifo(tmp_path / "pipe.csv")
    path = name if "://" in name else str(tmp_path / name)
    for read in (read_frame, read_steps, lambda each: read_samples([each]), read_log):
        with pytest.raises((TableInputError, TraceError), match=said) as error:
            read(path)
        assert "Errno" not in str(error.value)


@pytest.mark.parametrize(("name", "content", "where"), [
    ("a.csv", b"a,b\n1,2\n3,4\n", "line 3"), ("a.csv", b"\na,b\n\n1,2\n  \n3,4\n", "line 6"),
    ("a.csv", b'a,b\n"1\n\n""",2\n3,4\n', "line 5"), ("a.csv", b"# of mine\na,b\n1,2\n#\n3,4\n", "line 5"),
    ("a.tsv", b"a\tb\r\n1\t2\r\n3\t4\r\n", "line 3"), ("a.jsonl", b'{"a": "\\""}\n\n{"a": 3}\n', "line 3"),
    ("a.parquet", PARQUET, "row 2")])
def test_a_row_is_named_by_the_line_that_an_editor_shows(name: str, content: bytes, where: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    assert place(tmp_path / name, 1, "#") == f"{tmp_path / name}, {where}"
    if name != "a.parquet":
        assert len(read_frame(tmp_path / name, tuple(FORMATS), comment="#")) == 2


def test_a_cell_is_named_by_file_line_and_column(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("plan,gpus,ms\n\n x ,8,1.5\n,none,-1\n")
    good, bad = read_rows(path, ("plan",), "plans", "docs/parallel.md")
    assert (good.text("plan", needed=True), good.whole("gpus"), good.positive_ms("ms")) == ("x", 8, 1.5)
    assert bad.text("plan") == bad.text("absent") == ""
    for read, said in ((lambda: bad.text("plan", needed=True), "column plan: the cell is empty"),
                       (lambda: bad.whole("gpus"), "column gpus: 'none' is no whole number from 1"),
                       (lambda: bad.positive_ms("ms"), "column ms: '-1.0' is no positive number of milliseconds")):
        with pytest.raises(TableInputError, match=rf"a\.csv, line 4, {said}"):
            read()


def test_cells_as_written_are_not_read_as_numbers(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("name, rows\n007 ,NA\nx\n")
    assert read_cells(tmp_path / "a.csv") == [{"name": "007", "rows": "NA"}, {"name": "x", "rows": ""}]
    pd.DataFrame({"name": ["007", None], "reuse": [[0.5, 1], None]}).to_parquet(tmp_path / "a.parquet")
    assert read_cells(tmp_path / "a.parquet") == [{"name": "007", "reuse": [0.5, 1]}, {"name": None, "reuse": None}]


@pytest.mark.parametrize(("name", "content"), [
    ("a.csv", TEXT), ("A.CSV", TEXT), ("a.csv", b"\xef\xbb\xbf" + TEXT), ("a.tsv", TEXT.replace(b",", b"\t")),
    ("a.parquet", PARQUET), ("a.jsonl", ROWS.to_json(orient="records", lines=True).encode()),
    ("a.csv", TEXT.rstrip(b"\n"))])
def test_tables_are_read_by_their_names(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    pd.testing.assert_frame_equal(read_frame(tmp_path / name, tuple(FORMATS)), ROWS)
    for shift in range(4):  # a character is cut at the end of what is looked at
        (tmp_path / "a.csv").write_bytes(b"t,m\n" + b"x" * shift + "ä€😀".encode() * 2000 + b",1\n")
        assert len(read_frame(tmp_path / "a.csv")) == 1


def test_long_reasons_end_with_a_word_and_an_output_needs_a_name() -> None:
    text = "a sentence of words\nthat goes on and on"
    assert cut_text(text, 100) == "a sentence of words that goes on and on"
    for most in range(11, 39):
        cut = cut_text(text, most)
        assert cut.endswith(" …") and len(cut) <= most + 2
        assert set(cut.removesuffix(" …").split()) <= set(text.split())
    assert cut_text("x" * 50, 10) == "x" * 10 + " …"
    assert reason_of(ValueError()) == "ValueError"
    with pytest.raises(ForetraceError, match="is empty; name a file"):
        check_output("", [], PROFILE)


def test_values_that_parquet_stores_by_a_dictionary_are_plain(tmp_path: Path) -> None:
    frame = pd.DataFrame({"gpu": pd.Categorical(["a", "b", None], ["a", "b", "of no row"]),
                          "n": pd.Categorical([1, 2, 2])})
    frame.to_parquet(tmp_path / "a.parquet")
    read = read_frame(tmp_path / "a.parquet")
    assert [str(dtype) for dtype in read.dtypes] == ["object", "int64"]
    assert read.gpu.isna().tolist() == [False, False, True] and read.groupby("gpu").size().to_dict() == {"a": 1, "b": 1}
