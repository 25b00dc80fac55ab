"""One way to read JSON and TOML of our own: a value of the wanted form, or ``DecodeError``."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from tracer.guard import MOST_DEPTH
from tracer.input_file import DecodeError, convert, from_json, from_toml, list_of, value_of


class Form(msgspec.Struct):
    number: int
    texts: list[str] = []


JSON = [b"", b"{", b"\xff\xfe", b'{"a": Infinity}', b"[" * 100_000, b'{"a":' * 100_000, b"1e999999",
        b"[" * (MOST_DEPTH + 2) + b"]" * (MOST_DEPTH + 2), b'{"a": [' + b"9" * 400 + b"]}"]
TOML = [b"a = ", b"[" * 3000, b"a = " + b"[" * 500 + b"]" * 500, b"\xff", b"a = " + b"9" * 5000, b"a = " + b"9" * 400,
        b"a = " + b"{a=" * 90 + b"1" + b"}" * 90]


@pytest.mark.parametrize(("text", "read"), [
    *((each, from_json) for each in JSON), *((each, from_toml) for each in TOML)])
def test_what_is_no_json_or_no_toml_is_told(text: bytes, read: Callable[[bytes], object]) -> None:
    with pytest.raises(DecodeError):
        read(text)


def test_a_wrong_field_is_named() -> None:
    assert from_json(b'{"number": 3, "texts": ["a"]}', Form) == Form(3, ["a"])
    with pytest.raises(DecodeError, match="number"):
        from_json(b'{"number": "x"}', Form)
    with pytest.raises(DecodeError, match=r"texts\[1\]"):
        convert({"number": 1, "texts": ["a", 2]}, Form)
    with pytest.raises(DecodeError):
        from_json(b'{"number": ' + b"9" * 5000 + b"}", Form)
    with pytest.raises(DecodeError, match="three hundred digits"):
        from_json(b'{"number": ' + b"9" * 400 + b"}", Form)
    assert from_json(b'{"number": 1, "texts": ["' + b"9" * 400 + b'"]}', Form).texts == ["9" * 400]


@pytest.mark.parametrize("text", [
    "", "[1,", "null", "[" * 100_000, "[" * (MOST_DEPTH + 2) + "]" * (MOST_DEPTH + 2), "9" * 5000, "[1e999]",
    "[" + "9" * 400 + "]",
    '["\\ud800"]', '["\udcff"]', "{}"])
def test_what_a_profiler_did_not_write_is_an_empty_list(text: str) -> None:
    assert list_of(text) == []


def test_sound_values_and_a_profilers_texts_come_back() -> None:
    assert list_of('[[2, 3], [], "x", 1.5]') == [[2, 3], [], "x", 1.5]
    assert value_of("1.5") == 1.5 and value_of(str([1] * 100)) == [1] * 100
    assert from_json('{"a": [1, {"b": null}]}') == {"a": [1, {"b": None}]}
    assert from_toml("a = [1, 2]\n[b]\nc = 'é'".encode()) == {"a": [1, 2], "b": {"c": "é"}}
