"""Damage to files of other programs, and files that claim, share or nest more than they hold.

SQLite by its pages and its rows, pickles by their operations, XML by its attributes, JSON by its nesting, tables by
their cells, traces by their ranges. Mutators are as in ``fuzz_mutators``.
"""

from __future__ import annotations

import gzip
import io
import json
import pickle
import re
import sqlite3
import zlib
from contextlib import closing, suppress
from functools import lru_cache
from random import Random
from typing import Any

from fuzz_mutators import NUMBERS, TEXTS, change_tree, plain_bytes

MOST_BYTES = 1_500_000
"""Of what is made here: a file of less than 2 MB may take 5 s of processor time."""
# Long ones are rare: a case of them costs as much as a hundred others.
_LONG = [*[1000] * 9, 70_000, 400_000, 1_000_000]
_TIMES = [*[10, 100, 300] * 4, 1000, 5000, 20_000]
_DOUBLED = [*[1, 3] * 6, 10]

# SQLite ---------------------------------------------------------------------------------------------------------------

_CELLS = ["NULL", "'x'", "''", "-1", "0", "9223372036854775807", "-9223372036854775808", "1e308", "0.5", "x'ff00fe'",
           "CAST(x'c3286161ed' AS TEXT)", "'1.5'", "char(0)", "char(55296)", "4611686018427387904",
          "hex(zeroblob(50000))"]


def sqlite_rows(r: Random, data: bytes) -> bytes:
    """An SQLite file with other cells, columns, tables, and more rows."""
    with closing(sqlite3.connect(":memory:")) as file:
        file.deserialize(data)
        for _ in range(r.choice([1, 1, 2, 4])):
            with suppress(sqlite3.Error):
                for statement in _statements(r, file):
                    file.execute(statement)
        file.commit()
        return bytes(file.serialize())


def _statements(r: Random, file: sqlite3.Connection) -> list[str]:
    tables = [name for (name,) in file.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    table = r.choice(tables)
    columns = [row[1] for row in file.execute(f'PRAGMA table_info("{table}")')]
    column = f'"{r.choice(columns)}"'
    what = r.randrange(14)
    some = f" WHERE rowid % {r.choice([1, 2, 7])} = 0"
    if what < 5:
        chosen = r.sample(columns, min(len(columns), r.choice([1, 2, 5])))
        return [f'UPDATE {table} SET "{name}" = {r.choice(_CELLS)}' + some for name in chosen]
    if what == 5:
        return [f"INSERT INTO {table} SELECT * FROM {table}"] * r.choice(_DOUBLED)
    if what == 6:  # one long name for all
        text = f"substr(hex(zeroblob({r.choice(_LONG) // 2})), 1)"
        named = [name for name in ("demangledName", "shortName", "nameId", "textId") if name in columns]
        return [f"UPDATE StringIds SET value = {text} WHERE rowid = 1",
                *(f"UPDATE {table} SET {name} = (SELECT id FROM StringIds WHERE rowid = 1)" for name in named),
                *[f"INSERT INTO {table} SELECT * FROM {table}"] * r.choice(_DOUBLED)]
    if what == 7:  # a long default stands in every row and nowhere
        long = "x" * r.choice(_LONG)
        return [f"ALTER TABLE {table} DROP COLUMN {column}",
                f"ALTER TABLE {table} ADD COLUMN {column} {r.choice(['TEXT', 'BLOB', ''])} DEFAULT '{long}'",
                *[f"INSERT INTO {table} SELECT * FROM {table}"] * r.choice([0, *_DOUBLED])]
    if what == 8:
        return [f"ALTER TABLE {table} RENAME TO {r.choice(['x', 'CUPTI_ACTIVITY_KIND_KERNEL', 'NVTX_EVENTS'])}"]
    if what == 9:
        return [f"ALTER TABLE {table} DROP COLUMN {column}"]
    if what == 10:
        odd = r.choice(["name = NULL", "name = x'ff'", "name = 7", "sql = 'CREATE TABLE x'", "sql = NULL",
                        "rootpage = 2", "rootpage = 0", "rootpage = 99999", "type = 'view'", "tbl_name = 'y'",
                        "sql = zeroblob(1000)",
                        "name = CAST(x'ff' AS TEXT)", f"sql = 'CREATE TABLE {table} (' || hex(zeroblob(9)) || ')'"])
        return ["PRAGMA writable_schema = ON", f"UPDATE sqlite_master SET {odd} WHERE name = '{table}'"]
    if what == 11:
        return [f"DELETE FROM {table}"]
    if what == 12:
        return [f"ALTER TABLE {table} RENAME TO old",
                f"CREATE VIEW {table} AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) "
                "SELECT old.* FROM old, n"]
    return [f"ALTER TABLE {table} DROP COLUMN {column}",
            f"ALTER TABLE {table} ADD COLUMN {column} AS (hex(zeroblob(1000000)))"]


def sqlite_pages(r: Random, data: bytes) -> bytes:
    """An SQLite file whose pages are odd: swapped, doubled, pointing elsewhere, with other headers and schema bytes."""
    found = bytearray(data)
    size = int.from_bytes(found[16:18], "big") or 4096
    pages = max(len(found) // size, 1)
    for _ in range(r.choice([1, 1, 2, 5])):
        page, other = (r.randrange(pages) * size for _ in range(2))
        what = r.randrange(7)
        if what == 0:
            found[page:page + size] = found[other:other + size]
        elif what == 1:  # a page's header: its kind, number of cells, where they are
            found[page + r.randrange(12)] = r.choice([0, 2, 5, 10, 13, 255, r.randrange(256)])
        elif what == 2:  # an interior page whose children are one page
            child = (r.randrange(pages) + 1).to_bytes(4, "big")
            cells = min((size - 20) // 8, 400)
            begin = size - 6 * cells
            found[page:page + size] = (
                bytes([5, 0, 0]) + cells.to_bytes(2, "big") + begin.to_bytes(2, "big") + b"\0" + child
                + b"".join((begin + 6 * i).to_bytes(2, "big") for i in range(cells)) + bytes(begin - 12 - 2 * cells)
                + b"".join(child + bytes([i // 128 | 128, i % 128]) for i in range(cells)))[:size]
        elif what == 3:
            found[r.randrange(100)] = r.choice([0, 1, 255, r.randrange(256)])
        elif what == 4:  # of the schema
            found[100 + r.randrange(max(min(size, len(found)) - 100, 1))] = r.randrange(256)
        elif what == 5:
            found[page + r.randrange(size)] ^= 1 << r.randrange(8)
        else:
            del found[page:page + r.choice([size, size // 2])]
            pages = max(len(found) // size, 1)
        if len(found) < size:
            break
    return bytes(found)


# pickles --------------------------------------------------------------------------------------------------------------

_KEYS = [b")" + b"\x85" * 200_000, *[b")"] * 5, b"]", b"}", b"K\x01", b"\x8a\xff" + b"\x7f" * 255, b"N", b"\x88",
         b"G" + b"\x7f" * 8]
_VALUES = [b"\x8b\xe8\x03\x00\x00" + b"\x7f" * 1000, b"]" * 50_000 + b"a" * 49_999, b"\x8a\x09\0\0\0\0\0\0\0\0\x01",
           b"X\x02\0\0\0\xff\xfe", b"X\x03\0\0\0\xed\xa0\x80", b"(" + b"K\x01" * 90_000 + b"l",
           b"J\xff\xff\xff\xff", b"N", b")", b"]", b"}", b"G\x7f\xf0\0\0\0\0\0\0", b"G\x7f\xf8\0\0\0\0\0\0", b"\x89",
           b"I" + b"9" * 4000 + b"\n"]


def pickle_operations(r: Random, data: bytes) -> bytes:
    """A pickle with operations more, less, elsewhere, or with other operands."""
    import pickletools

    found = data
    for _ in range(r.choice([1, 1, 2])):
        operations = list(pickletools.genops(found))
        (operation, operand, at), end = r.choice(operations[1:-1]), len(found)
        where = [place for _, _, place in operations] + [end]
        after = min(place for place in where if place > at)
        own = found[at:after]
        what = r.randrange(6)
        if what == 0:
            own = b""
        elif what == 1:
            own = own * r.choice([2, 2, 2, 100])
        elif what == 2:
            own = r.choice(_VALUES)
        elif what == 3:  # a key and a value more, where a dictionary is filled
            own = r.choice(_KEYS) + r.choice(_VALUES) + own if operation.name in ("SETITEMS", "APPENDS") else own
        elif what == 4 and isinstance(operand, int):
            own = own[:1] + r.choice([b"\xff", b"\0", b"\x7f"]) * (len(own) - 1)
        else:
            own = r.choice([b"0", b"(", b"2", b"e", b"u", b"s", b"a", b"\x94", b"\x93", b"R", b"h\x00", b"h\x05",
                            b"b"]) + own
        found = found[:at] + own + found[after:]
    return found


def pickle_tree(r: Random, data: bytes) -> bytes:
    """A snapshot with other values, or whose events share what they hold."""
    from tracer.memory_snapshot import plain_pickle

    tree = plain_pickle(io.BytesIO(data), "seed")
    events = next((events for events in tree.get("device_traces", []) if isinstance(events, list) and events), None)
    what = r.randrange(5)
    if what < 2 or events is None or not isinstance(events[0], dict):
        tree = _plain(change_tree(r, tree))
    elif what == 2:  # one stack for all
        long = "x" * r.choice([3, 1000, 300_000]) + r.choice([".py", "torch/optim", "backward"])
        stack = [{"filename": long, "line": r.choice([i, 7]), "name": r.choice([long, "f"])}
                 for i in range(r.choice([*[1, 100] * 5, 10_000]))]
        events += [{**events[0], "addr": 512 * i, "frames": stack} for i in range(r.choice(_TIMES))]
    elif what == 3:  # one frame in all stacks
        frame = {"filename": "x" * r.choice(_LONG) + ".py", "line": 1, "name": "f"}
        for i in range(r.choice([*[10, 50] * 5, 1000])):
            events.append({**events[0], "addr": 512 * i, "frames": [frame] * r.choice([1, 50, 300])})
    else:
        for event in events:
            event[r.choice(["size", "addr", "time_us"])] = r.choice(NUMBERS)
        blocks = [{"state": "active_allocated", "size": r.choice(NUMBERS), "frames": []}] * r.choice(_TIMES)
        tree["segments"] = [{"device": 0, "allocated_size": r.choice(NUMBERS), "total_size": r.choice(NUMBERS),
                             "blocks": blocks}] * r.choice([1, 1000])
    found = pickle.dumps(tree, r.choice([0, 2, 4]))
    return found if len(found) < 4 * MOST_BYTES else data


def _plain(value: Any, made: dict[int, Any] | None = None) -> Any:
    """A tree without classes of the fuzzer's own; what was shared is shared (``made``, by identity)."""
    made = {} if made is None else made
    if isinstance(value, dict | list | tuple):
        if id(value) not in made:
            made[id(value)] = {str(key): _plain(part, made) for key, part in value.items()} if isinstance(
                value, dict) else [_plain(part, made) for part in value]
        return made[id(value)]
    return str(value) if isinstance(value, str) else value


# XML and tables of nodes ----------------------------------------------------------------------------------------------

_ATTRIBUTES = ["³", "1.1.1 GT/s", "9" * 30, "-1", "0", "x" * 100_000, "nan", "1e9", "", "&lt;", "99999 GT/s",
               "1e309 GT/s", "٣", "999999999", "32.0 GT/s PCIe", ". GT/s", "0x10", "\u202e", "1_000", " 7", "0.0 GT/s",
               "400000"]


def xml_attributes(r: Random, data: bytes) -> bytes:
    """XML with other attributes, elements again and again, or nested without end."""
    text = data.decode("utf-8", "replace")
    for _ in range(r.choice([1, 1, 2, 4])):
        attributes = list(re.finditer(r'\b(\w+)="([^"]*)"', text))
        elements = list(re.finditer(r"<\w+[^<>]*/>", text))
        what = r.randrange(7)
        if what < 3 and attributes:
            one = r.choice(attributes)
            text = f'{text[:one.start(2)]}{r.choice(_ATTRIBUTES)}{text[one.end(2):]}'
        elif what == 3 and attributes:
            name = r.choice(attributes)[1]
            text = re.sub(rf'\b{name}="[^"]*"', f'{name}="{r.choice(_ATTRIBUTES)[:50]}"', text)
        elif what == 4 and elements:
            one = r.choice(elements)
            text = text[:one.end()] + one[0] * min(r.choice(_TIMES), MOST_BYTES // len(one[0])) + text[one.end():]
        elif what == 5:
            depth = r.choice([*[10, 100] * 3, 5000, 100_000])
            text = "<pci>" * depth + re.sub(r"^<\?xml.*?\?>", "", text) + "</pci>" * depth
        else:
            return plain_bytes(r, text.encode())
    return text[:MOST_BYTES].encode("utf-8", "surrogatepass")


def node_table(r: Random, data: bytes) -> bytes:
    """The table of a node with other cells, rows and columns."""
    rows = [line.split("\t") for line in data.decode("utf-8", "replace").splitlines()]
    for _ in range(r.choice([1, 1, 3])):
        row = r.choice(rows)
        what = r.randrange(6)
        if what < 3:
            row[r.randrange(len(row))] = r.choice(["NV18", "NV999", "X", "", "GPU0", "NV³", "GPU9", "SYS", *TEXTS[:14]])
        elif what == 3:
            row *= r.choice([*[0, 2] * 5, 5000])
        elif what == 4:
            rows += [list(row) for _ in range(r.choice([*[1] * 5, 1000]))]
        else:
            rows.remove(row)
            rows = rows or [[""]]
    return "\n".join("\t".join(row) for row in rows)[:MOST_BYTES].encode("utf-8", "surrogatepass")


# JSON and tables ------------------------------------------------------------------------------------------------------


def json_bomb(r: Random, data: bytes) -> bytes:
    """JSON with a value that is nested, long, or there again and again."""
    packed = data[:2] == b"\x1f\x8b"
    text = (gzip.decompress(data) if packed else data).decode("utf-8", "replace")
    what = r.randrange(5)
    values = list(re.finditer(r'(?<=[:\[,])\s*("[^"\\]*"|-?\d+)(?=\s*[,\]}])', text))
    objects = list(re.finditer(r"\{[^{}]*\}", text))
    if what == 0 and values:
        one, depth = r.choice(values), r.choice([60, 500, 1500, 3000, 100_000])
        begin, end = r.choice([("[", "]"), ('{"a":', "}"), ("[[],", "]")])
        text = text[:one.start()] + begin * depth + one[1] + end * depth + text[one.end():]
    elif what == 1 and values:
        one = r.choice(values)
        text = text[:one.start()] + '"' + r.choice(["k", "é", "<", ", sizes = ", "a::b "]) * r.choice(
            [*[10_000] * 9, 200_000]) + '"' + text[one.end():]
    elif what == 2 and objects:
        one = r.choice(objects)
        times = min(r.choice(_TIMES), MOST_BYTES // (len(one[0]) + 1))
        text = text[:one.end()] + f",{one[0]}" * times + text[one.end():]
    elif what == 3 and objects:
        one = r.choice(objects)
        text = text[:one.end()] + ",{}" * r.choice([*[1000] * 9, 100_000, 400_000]) + text[one.end():]
    elif values:
        one = r.choice(values)
        return _packed(text[:one.start()].encode() + b'"' + r.choice([b"\xff", b"\xc3\x28", b"\xed\xa0\x80"]) + b'"'
                       + text[one.end():].encode(), packed)
    return _packed(text[:10 * MOST_BYTES if packed else 2 * MOST_BYTES].encode(), packed)


def _packed(data: bytes, packed: bool) -> bytes:
    return gzip.compress(data, 1, mtime=0) if packed else data


def nested_ranges(r: Random, data: bytes) -> bytes:
    """A trace with ranges of modules, operations or marks in one another, or after one another with long names."""
    packed = data[:2] == b"\x1f\x8b"
    tree = json.loads(gzip.decompress(data) if packed else data)
    events = tree if isinstance(tree, list) else tree["traceEvents"]
    first = next(event for event in events if isinstance(event, dict) and event.get("cat") == "cpu_op")
    count = r.choice([*[50, 200] * 6, 1000, 5000, 12_000])
    category, name = r.choice([("python_function", "nn.Module: L"), ("cpu_op", "aten::op"), ("user_annotation", "mark"),
                               ("cuda_runtime", "cudaLaunchKernel"), ("python_function", "a.py(3): f")])
    long = "x" * r.choice([0, 0, 500]) if count < 2000 else ""
    nested, numbered = r.random() < 0.7, r.random() < 0.6
    at = float(first["ts"])
    events += [{"ph": "X", "cat": category, "name": f"{name}{long}_{i if numbered else 0}", "pid": first["pid"],
                "tid": first["tid"], "ts": at + (i if nested else 2 * i) * 0.001,
                "dur": 2 * (count - i) * 0.001 if nested else 0.001} for i in range(count)]
    text = json.dumps(tree).encode()
    return _packed(text, packed)


def table_bomb(separator: str) -> Any:
    """What makes a table wide, long, or of very long cells."""

    def mutate(r: Random, data: bytes) -> bytes:
        lines = data.decode("utf-8", "replace").splitlines()
        what = r.randrange(6)
        if what == 0:
            lines[0] += "".join(f"{separator}c{i}" for i in range(r.choice([1000, 50_000])))
        elif what == 1:
            lines += [r.choice(["1", "", "x", '"'])] * r.choice([1000, 100_000])
        elif what == 2:
            lines = [lines[0], *[lines[-1]] * min(r.choice([100, 20_000]), MOST_BYTES // max(len(lines[-1]), 1))]
        elif what == 3:
            cells = lines[-1].split(separator)
            cells[r.randrange(len(cells))] = r.choice(["x", "9", "-", "é", "(", "[", "1,"]) * r.choice([5000, 300_000])
            lines[-1] = separator.join(cells)
        elif what == 4:
            lines[0] += separator * r.choice([1, 100, 100_000])
        else:
            lines[r.randrange(len(lines))] += '"'
        return "\n".join(lines).encode()[:MOST_BYTES]

    return mutate


@lru_cache(maxsize=4)
def _gzip_of(megabytes: int) -> bytes:
    """A gzip of many members, a thousand times as long unpacked."""
    return gzip.compress(b"[" + b" " * (10**7 - 1), mtime=0) * max(megabytes // 10, 1)


def any_file(r: Random, data: bytes) -> bytes:
    """What may lie under any file's name: other encodings and ends of lines, one line, nothing but zeros, a gzip."""
    text = data.decode("utf-8", "replace")
    what = r.randrange(8)
    if what < 2:
        return text.encode(r.choice(["utf-8-sig", "utf-16", "utf-16-le", "utf-32", "cp037", "utf-7"]), "replace")
    if what == 2:
        return r.choice(["\r", "\r\n", " ", "\0", "\u2028", "\x0b", "\n\n"]).join(text.split("\n")).encode()
    if what == 3:
        part = r.choice(["x", "9", "[", '{"a":', " ", ",", "\t", "-", "a=", "<a>", "#", '"', "(", "\0", "é"])
        long = part * (r.choice([*[10_000] * 9, MOST_BYTES - 1]) // len(part.encode()))
        return r.choice([long, f"{text}\n{long}", f"{long}\n{text}", text.replace("\n", f"{long}\n", 1)]).encode()
    if what == 4:
        return r.choice([gzip.compress(data, mtime=0), zlib.compress(data), _gzip_of(r.choice([*[10] * 20, 1000]))])
    if what == 5:  # all columns twice
        separator = r.choice([",", "\t"])
        return "\n".join(line + separator + line if line else "" for line in text.split("\n")).encode()
    if what == 6:
        number = r.choice(["-1", "-9223372036854775808", "9223372036854775808", "18446744073709551616", "0", "1e308"])
        return re.sub(r"(?<![\w.\"-])\d+(?:\.\d+)?(?![\w.\"])", number, text).encode()
    return r.choice([b"", b"\xef\xbb\xbf", b"\xff\xfe", b"\n", b"\r", b"\0" * r.choice([1, 10_000]), b" " * 10_000])


def lines_bomb(r: Random, data: bytes) -> bytes:
    """JSON lines whose keys differ, or that are very many."""
    lines = data.splitlines()
    count = r.choice([*[100] * 9, 20_000, 60_000])
    more = [f'{{"k{i}": {i}}}'.encode() for i in range(count)] if r.random() < 0.5 else [b"{}"] * count
    return b"\n".join([*lines, *more])[:MOST_BYTES]
