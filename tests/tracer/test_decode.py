"""One way to read JSON and TOML of our own: a value of the wanted form, or ``DecodeError``."""

from __future__ import annotations

import msgspec
import pytest

from tracer.decode import MOST_DEPTH, DecodeError, convert, from_json, from_toml


class Form(msgspec.Struct):
    number: int
    texts: list[str] = []


@pytest.mark.parametrize("text", [
    b"", b"{", b"nul", b"\xff\xfe", b"NaN", b'{"a": Infinity}', b"[" * 100_000, b'{"a":' * 100_000, b"1e999999",
    b"[" * (MOST_DEPTH + 2) + b"]" * (MOST_DEPTH + 2)])
def test_what_is_no_json_is_told(text: bytes) -> None:
    with pytest.raises(DecodeError):
        from_json(text)


@pytest.mark.parametrize("text", [
    b"a = ", b"[" * 3000, b"a = " + b"[" * 500 + b"]" * 500, b"\xff", b"a = " + b"9" * 5000,
    b"a = " + b"{a=" * 90 + b"1" + b"}" * 90])
def test_what_is_no_toml_is_told(text: bytes) -> None:
    with pytest.raises(DecodeError):
        from_toml(text)


def test_a_wrong_field_is_named() -> None:
    assert from_json(b'{"number": 3, "texts": ["a"]}', Form) == Form(3, ["a"])
    with pytest.raises(DecodeError, match="number"):
        from_json(b'{"number": "x"}', Form)
    with pytest.raises(DecodeError, match=r"texts\[1\]"):
        convert({"number": 1, "texts": ["a", 2]}, Form)
    with pytest.raises(DecodeError):
        from_json(b'{"number": ' + b"9" * 5000 + b"}", Form)


def test_sound_values_come_back() -> None:
    assert from_json('{"a": [1, {"b": null}]}') == {"a": [1, {"b": None}]}
    assert from_toml("a = [1, 2]\n[b]\nc = 'é'".encode()) == {"a": [1, 2], "b": {"c": "é"}}
