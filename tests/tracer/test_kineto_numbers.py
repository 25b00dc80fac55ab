"""Digits → nanoseconds: exact, never through float."""

from __future__ import annotations

import json
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracer.graph import LossReport
from tracer.kineto import processes
from tracer.kineto.chunks import EventStream
from tracer.kineto.events import EVENTS, MAX_US, Args, decimal_nanoseconds, integer, plain_text
from tracer.kineto.scanner import Scanner


def convert(*texts: str) -> list[int | None]:
    """Times of events as they are read, each in a trace of its own."""
    found: list[int | None] = []
    for text in texts:
        stream = EventStream([f'[{{"ph":"X","ts":{text}}},{{"ph":"X"}}]'.encode()], "t", LossReport(), Scanner())
        [batch] = stream
        values, valid = batch.time("ts", np.zeros(1, np.int64))
        found.append(int(values[0]) if valid[0] else None)
    return found


@pytest.mark.parametrize(("text", "nanoseconds"), [
    # float("1712195495519761.132") is ...761.25: a float64 there has 0.25 us resolution
    ("1712195495519761.132", 1712195495519761132), ("1661203462598738", 1661203462598738000), ("0.001", 1),
    ("1.5e3", 1_500_000), ('"42.5"', 42500), ('"12."', 12000), ('".5"', 500), ("-3.25", -3250), ("1E-3", 1),
    ("1.0004", 1000), ("1.0005", 1001), ("1.9999999", 2000)])
def test_times_keep_every_nanosecond_and_round_half_up(text: str, nanoseconds: int) -> None:
    assert convert(text) == [nanoseconds]


@pytest.mark.parametrize("text", ["null", "NaN", "Infinity", "-Infinity", "true", '"x"', "[1]", "{}", '"1.2.3"',
                                  '"--1"', "1e999999999", "99999999999999999999", "[\n1\n]"])
def test_no_number_is_not_valid(text: str) -> None:
    assert convert("7", text, "8") == [7000, None, 8000]


@given(st.lists(st.decimals(min_value=-MAX_US, max_value=MAX_US, allow_nan=False, places=3), min_size=1))
def test_agrees_with_decimal(numbers: list[Decimal]) -> None:
    texts = [f"{number:f}" for number in numbers]
    assert convert(*texts) == [int((n * 1000).to_integral_value(ROUND_HALF_UP)) for n in numbers]


@given(st.lists(st.integers(-10**20, 10**20), min_size=1))
def test_integers_beyond_64_bits_are_minus_one(numbers: list[int]) -> None:
    short = [number for number in numbers if len(str(number)) < 20]
    ends = [2**63 - 1, 2**63, -2**63, -2**63 - 1, 2**64 - 1]
    for each in (short, *([end] for end in ends)):
        text = ",".join(f'{{"ph":"X","args":{{"Ev Idx":{n}}}}}' for n in each)
        batch = Scanner().scan(text.encode())
        assert batch is not None
        assert batch.number("event_index", np.arange(batch.events)).tolist() == [integer(number) for number in each]


_ODD = [
    '{"ph":"X",}', '{"ph":"X"},', '{"ph":01}',
    '{"ph":"X" "ts":1}', '{"ph":"\\q"}', '{"ph":"a\tb"}', "null", "[]", '"x"',
    '{"ph":"X","ts":01}', '{"ph":"X","ts":1.}', '{"ph":"X","ts":-}', '{"ts":NaN}', '{"zz":[1,2,]}', '{"zz":{"a" 1}}',
    '{"args":{"Ev Idx":1.0}}', '{"args":{"Ev Idx":"1"}}', '{"args":{"correlation":"x"}}', '{"args":[1]}',
    '{"args":{"Collective name":"a","Group size":1.5}}', '{"pid":1.5}', '{"name":5}', '{"name":null}',
    '{"n\\u0061me":"a"}',
    '{"name":"\\ud800"}', '{"zz":"\\ude00"}', '{"zz":"\\ud800\\u0041"}',
    '{"zz":"\\ud83d"}','{"args":{},"args":{}}', '{"ph":"X"', '{"ph":"X"}{"ph":"X"}',
    '{"zz":tru}', '{"zz":--1}', '{"zz":' + "[" * 9999 + "]" * 9999 + "}"]
_PLAIN = [
    '{"ph":"X","cat":null,"name":"a\\n\u00e9\\u00e9","pid":"p","tid":7,"ts":1.5,"dur":2,"args":{"External id":3}}',
    "{}", '{"args":null}', '{"zz":{"a":[1,{"b":null}]},"ph":"X"}', ' { "ph" : "X" , "args" : { } } ',
    '{"zz":-0.5e+3}', '{"args":{"Input Dims":[[1, 2],[]],"grid":null,"name":"x","bytes":"-5"}}',
    '{"pid":123456789012345678901234}',
    '{"name":"\\ud83d\\ude00","zz":"\\uD83D\\uDE00","args":{"grid":"\\uDBFF\\udfff"}}']


@pytest.mark.parametrize("text", _ODD)
def test_the_scanner_leaves_what_is_odd(text: str) -> None:
    scanner = Scanner()
    assert scanner.scan(text.encode()) is None
    assert scanner.scan(b'{"ph":"X","name":"a"},' + text.encode()) is None
    assert scanner.scan(b'{"ph":"X","name":"b"}') is not None and scanner.values[-1] == "b"  # nothing of it stays


@pytest.mark.parametrize("text", _PLAIN)
def test_the_scanner_reads_what_the_decoder_reads(text: str) -> None:
    scanner = Scanner()
    batch, [event] = scanner.scan(text.encode()), EVENTS.decode(f"[{text}]")
    assert batch is not None and batch.events == 1
    row, args = np.zeros(1, np.int64), event.args or Args()

    def value(name: str) -> Any:
        return scanner.values[int(batch.code(name, row)[0])]

    assert [value(name) for name in ("ph", "cat", "name", "pid", "tid")] == \
        [event.ph, event.cat, event.name, event.pid, event.tid]
    assert [value(name) for name in ("dims", "grid")] == [bytes(args.dims), bytes(args.grid)]
    assert batch.number("external", row)[0] == integer(args.external)
    assert batch.number("bytes", row)[0] == integer(args.bytes)
    for name, raw in (("ts", event.ts), ("dur", event.dur)):
        values, valid = batch.time(name, row)
        assert (values[0], valid[0]) == decimal_nanoseconds(bytes(raw))


def test_what_was_odd_can_be_scanned_once_decoded() -> None:
    odd = [{"ph": "X", "name": "a", "pid": 2**70, "args": {
        "External id": "x", "correlation": " 12", "Ev Idx": 2**64, "Collective name": "all", "Group size": "2",
        "dtype": "f", "Process Group Ranks": [0, 2**70], "Process Group ID": 2**70, "name": 1.5,
        "Is asynchronized op": True}}]
    batch = Scanner().scan(plain_text(EVENTS.decode(json.dumps(odd))))
    assert batch is not None
    row = np.zeros(1, np.int64)
    assert [batch.number(name, row)[0] for name in ("external", "correlation", "event_index")] == [-1, 12, -1]
    assert batch.collectives[0].ranks == str([0, 2**70])


def test_processes_are_in_the_order_of_their_numbers_however_long() -> None:
    pids = ["9" * 5000, "10002", "rank 10", "9998", "rank 2", "007"]
    assert sorted(pids, key=processes._by_number) == ["007", "9998", "10002", "9" * 5000, "rank 2", "rank 10"]
