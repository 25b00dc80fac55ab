"""Mending the invalid JSON some profilers write: unescaped quotes, stray backslashes, control bytes, NaN, commas.

Works on the text of *one* event, so that damage stays local. The rule for quotes: a quote inside a string ends it
only if what follows looks like the rest of an object (``: `` after a key; ``,`` + value, ``}`` or ``]`` after a value).
"""

from __future__ import annotations

import re

MAX_EVENT_BYTES = 1 << 20
"""Longer fragments are not mended: no real event comes near (the longest seen has 40 KB)."""

_AFTER_KEY = re.compile(r"\s*:\s*[\"{\[\-0-9tfnNI]")
_AFTER_VALUE = re.compile(r"\s*(?:[}\]]|,\s*[\"{\[\-0-9tfnNI}\]]|$)")
_ESCAPE = re.compile(r"\\(?:[\"\\/bfnrt]|u[0-9a-fA-F]{4})")
_LONE_SURROGATE = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F][0-9a-fA-F]{2})|"
    r"(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_BARE = re.compile(r"-?(?:NaN|Infinity|inf|nan)\b")
_TRAILING_COMMA = re.compile(r",\s*(?=[}\]])")
_PLAIN = re.compile(r"[^\"\\\x00-\x1f]+")


def repair_event(text: bytes) -> bytes | None:
    """The event's text as valid JSON where the known faults explain it, or None if it is too long to try.

    The caller decodes the result; this function does not promise that it is valid.
    """
    if len(text) > MAX_EVENT_BYTES:
        return None
    source = text.decode("utf-8", errors="replace")
    out: list[str] = []
    at = 0
    while at < len(source):
        quote = source.find('"', at)
        if quote < 0:
            out.append(_outside(source[at:]))
            break
        out.append(_outside(source[at:quote]))
        body, at = _string(source, quote + 1)
        out.append(f'"{body}"')
    return "".join(out).encode()


def _outside(text: str) -> str:
    return _TRAILING_COMMA.sub("", _BARE.sub("null", text))


def _string(source: str, at: int) -> tuple[str, int]:
    """The repaired body of the string that starts at ``at`` and the position after its closing quote."""
    out: list[str] = []
    escapes: list[int] = []
    raw_backslashes = False
    while at < len(source):
        plain = _PLAIN.match(source, at)
        if plain:
            out.append(plain.group())
            at = plain.end()
            continue
        char = source[at]
        if char == '"':
            if _AFTER_KEY.match(source, at + 1) or _AFTER_VALUE.match(source, at + 1):
                return _body(out, escapes, raw_backslashes), at + 1
            out.append('\\"')
            at += 1
        elif char == "\\":
            escape = _ESCAPE.match(source, at)
            if escape:
                escapes.append(len(out))
                out.append(escape.group())
                at = escape.end()
            else:
                raw_backslashes = True
                out.append("\\\\")
                at += 1
        else:
            out.append(f"\\u{ord(char):04x}")
            at += 1
    return _body(out, escapes, raw_backslashes), at


def _body(parts: list[str], escapes: list[int], raw_backslashes: bool) -> str:
    """Join a string's parts. If one backslash was unescaped, so were the others: `C:\\qath\\file` has no form feed."""
    if raw_backslashes:
        for index in escapes:
            if parts[index][1].isalpha():
                parts[index] = "\\" + parts[index]
    return _LONE_SURROGATE.sub(r"\\ufffd", "".join(parts))
