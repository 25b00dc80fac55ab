"""Structure-aware damage: JSON trees, trace events, containers, arrays, tables, logs, TOML, and plain bytes.

Every mutator takes the source of choices ``r`` (a ``random.Random``) and a file's bytes,
and gives other bytes. Containers with a checksum are sealed again: what is inside is what shall be met.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import warnings
import zipfile
import zlib
from collections.abc import Callable
from functools import lru_cache
from random import Random
from typing import Any

import numpy as np

Mutator = Callable[[Random, bytes], bytes]
_RAW = "\ue000raw{}\ue001"

RAW = ["9" * 400, "NaN", "Infinity", "-Infinity", "1e400", "-1e308", "1e308", "9" * 5000, "-" + "9" * 5000,
       "0." + "3" * 3000,
       "1" + "0" * 30, "9223372036854775807", "9223372036854775808", "-9223372036854775809", "-0", "1e-320",
       "[" * 2000 + "]" * 2000, '{"a":' * 1500 + "1" + "}" * 1500, "[" * 100_000, "tru", '"\\ud800"', '"\\u0000"',
       '"\x1b[31m"', '{"a":1,"a":2}', "1.0000000000000000000001", "4294967295", "2147483648"]
"""JSON text that no Python value becomes."""
TEXTS = ["", " ", "\n", "x" * 70_000, "\x1b]0;owned\x07", "\x00", "é" * 300, "\u202e", "٣", "½", "²", "N/A", "1/0",
         "-1",
         "0", "1e308", "9" * 5000, "None", "null", "../../../etc/passwd", "%s%n", "{}", "[]", "[0, 1]", "[1,", "0-7",
         "0-99999999999", "ProfilerStep#1", "aten::linear", "float", "bfloat16", "nccl:all_reduce", "a,b", "a\tb", "'"]
NUMBERS: list[Any] = [0, 1, -1, 2, 3, 7, 255, 1 << 15, 1 << 31, (1 << 31) - 1, 1 << 32, 0xFFFFFFFF, 1 << 53, 1 << 62,
                      (1 << 63) - 1, 1 << 63, 1 << 64, -(1 << 31), -(1 << 63), 30_000_000, 10**11, 10**18, 10**25, 0.5,
                      -0.0, 1e-300, 1e15, 1e18, 1e300, 0.1, 1.5, 1000.001]
PLAIN: list[Any] = [None, True, False, [], {}, [[]], [None], [{}], {"": None}, [1, 2, 3], [[1, 2], [3]], ["a"],
                    {"a": {"b": [1]}}]


class _Raw(str):
    """JSON text to be put in as it is."""


def any_value(r: Random) -> Any:
    """A value of any type, often at an edge."""
    which = r.random()
    if which < 0.35:
        return r.choice(NUMBERS)
    if which < 0.55:
        return r.choice(TEXTS)
    if which < 0.75:
        return r.choice(PLAIN)
    return _Raw(r.choice(RAW))


_MOST_PLACES = 20_000


def near(r: Random, value: Any) -> Any:
    """A value that resembles the one there was."""
    if isinstance(value, bool) or value is None:
        return any_value(r)
    if isinstance(value, int | float):
        with np.errstate(all="ignore"):
            return r.choice([
                0, -value, value + 1, value - 1, value * 2, value * 1000, value * 10**9, value / 3, float(value),
                str(value), [value], -1, 1, value // 7, r.choice(NUMBERS)])
    if isinstance(value, str):
        at = r.randint(0, len(value))
        return r.choice([value[:at], value + value, value[::-1], value.upper(),
                         value[:at] + r.choice(TEXTS) + value[at:],
                         [value], 0, r.choice(TEXTS)])
    if isinstance(value, list):
        same = [value[:1], value[::-1], [], value[1:], {"0": value}, [value]]
        # A list grown again and again would fill the memory of the fuzzer itself.
        grown = [] if len(places(value)) > _MOST_PLACES else [value + value, value * 20,
                                                              [v for v in value for _ in range(2)]]
        return r.choice([*same, *grown])
    return r.choice([{}, [value], dict(list(value.items())[::2]), list(value)])


# JSON -----------------------------------------------------------------------------------------------------------------

def places(tree: Any) -> list[tuple[Any, Any]]:
    """(container, key) of every value in a tree; what several containers share, as a pickle's may, counts once."""
    found, todo, seen = [], [tree], {id(tree)}
    while todo:
        node = todo.pop()
        pairs = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        for key, value in pairs:
            found.append((node, key))
            if isinstance(value, dict | list) and id(value) not in seen:
                seen.add(id(value))
                todo.append(value)
    return found


def change_tree(r: Random, tree: Any, times: int = 0) -> Any:
    """Change a JSON tree in place in one to a few of its places."""
    for _ in range(times or r.choice([1, 1, 1, 2, 3, 6])):
        spots = places(tree)
        if not spots:
            return any_value(r)
        node, key = r.choice(spots)
        what = r.random()
        if what < 0.35:
            node[key] = near(r, node[key])
        elif what < 0.65:
            node[key] = any_value(r)
        elif what < 0.8:
            del node[key]
        elif what < 0.9:
            other, name = r.choice(spots)
            if _there(other, name):
                node[key] = json.loads(json.dumps(other[name], default=str))  # a copy: no tree may hold itself
        elif isinstance(node, dict):
            node[str(any_value(r))[:100] if r.random() < 0.5 else r.choice(list(node))] = node.pop(key)
        else:
            node.insert(r.randint(0, len(node)), any_value(r))
    return tree


def _there(node: Any, key: Any) -> bool:
    return key in node if isinstance(node, dict) else key < len(node)


def to_json(tree: Any) -> bytes:
    """The tree as JSON, raw texts put in as they are."""
    raws: list[str] = []

    def marked(value: Any) -> Any:
        if isinstance(value, _Raw):
            raws.append(str(value))
            return _RAW.format(len(raws) - 1)
        if isinstance(value, dict):
            return {str(key): marked(part) for key, part in value.items()}
        if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 1 << 4000:
            return 10**30
        return [marked(part) for part in value] if isinstance(value, list) else value

    text = json.dumps(marked(tree))
    for i, raw in enumerate(raws):
        text = text.replace(json.dumps(_RAW.format(i)), raw)
    return text.encode("utf-8", "surrogatepass")


def json_tree(r: Random, data: bytes) -> bytes:
    """A JSON file with parts of its tree changed."""
    return to_json(change_tree(r, json.loads(data)))


def json_text(r: Random, data: bytes) -> bytes:
    """A JSON file as other writers may have it: keys twice, other encodings, marks at its beginning, more after it."""
    text = data.decode("utf-8", "replace")
    what = r.randrange(6)
    if what == 0:
        keys = list(re.finditer(r'"[^"\\]{1,40}"\s*:', text))
        if keys:
            at, value = r.choice(keys).start(), r.choice([*RAW[:12], "1", "[]", "{}", "null"])
            text = f"{text[:at]}{r.choice(keys).group()} {value}, {text[at:]}"
    elif what == 1:
        return text.encode(r.choice(["utf-16", "utf-16-le", "utf-32", "utf-8-sig", "cp037"]), "replace")
    elif what == 2:
        return data + r.choice([b"{}", b"\n[]", b"\0" * 100, data, b"]", b"\xff"])
    elif what == 3:  # every number, or every text, of one kind
        value = r.choice(["NaN", "1e400", "-1", "0", '"5"', "null", "1e3", "9" * 25])
        text = re.sub(r"(?<=: )\d+(\.\d+)?", value, text)
    elif what == 4:
        at = text.find('"', r.randint(0, len(text))) + 1
        odd = r.choice(["\\ud800", "\\udfff", "\\ud83d\\ude00", "\\u0000", "\\u202e", "\\x41"])
        text = text[:at] + odd + text[at:]
    else:
        odd_byte = r.choice([b"\xe9", b"\xff", b"\xc3\x28", b"\xed\xa0\x80"])
        return text.encode("latin-1", "replace").replace(b"a", odd_byte)
    return text.encode("utf-8", "surrogatepass")


def json_lines(r: Random, data: bytes) -> bytes:
    """A file of JSON lines: lines changed, doubled, dropped, swapped, broken."""
    lines = data.splitlines()
    for _ in range(r.choice([1, 1, 2])):
        at = r.randrange(len(lines))
        what = r.random()
        if what < 0.6:
            try:
                lines[at] = to_json(change_tree(r, json.loads(lines[at])))
            except ValueError:
                lines[at] = b"{}"
        elif what < 0.7:
            lines.append(lines[at])
        elif what < 0.8 and len(lines) > 1:
            del lines[at]
        elif what < 0.9:
            lines[at] = plain_bytes(r, lines[at])
        else:
            lines.insert(at, r.choice([b"", b"null", b"[]", b"\xff\xfe", b"1", b"[" * 50_000]))
    return b"\n".join(lines) + (b"\n" if r.random() < 0.8 else b"")


_STATEMENTS = ["raise ValueError('\\x1b[31m')", "raise SystemExit(3)", "raise SystemExit('no')",
               "return None", "return 5", "1 / 0", "import nosuchmodule", "if", "\0", "raise BaseException('x')",
               "\t x",
               "print('\\ud800')", "raise MemoryError", "raise RecursionError", "del model", "torch.set_num_threads(1)",
               "yield 1", "raise OSError(28, 'full')", "assert False", "model = None", "raise Exception", "é = 1",
               "import sys; sys.stdout.close()", "import os; os.chdir('/')", "raise StopIteration", "batch = 'x'"]


def script(r: Random, data: bytes) -> bytes:
    """A program with a line more, less, elsewhere, or with one that is none."""
    lines = data.decode("utf-8").splitlines()
    for _ in range(r.choice([1, 1, 2])):
        at = r.randrange(len(lines))
        what, indent = r.random(), lines[at][:len(lines[at]) - len(lines[at].lstrip())]
        if what < 0.6:
            lines.insert(at, indent + r.choice(_STATEMENTS))
        elif what < 0.75:
            del lines[at]
        elif what < 0.85:
            lines[at] = indent + "pass"
        else:
            return plain_bytes(r, data)
    return "\n".join(lines).encode("utf-8", "surrogatepass")


def folder(r: Random, files: dict[str, bytes]) -> None:
    """Change in place which files a directory has: one less, twice, of other names, foreign ones among them."""
    name = r.choice(list(files))
    place, _, last = name.rpartition("/")
    what = r.randrange(7)
    if what == 0:
        files.pop(name)
    elif what == 1:
        files[f"{place}/{r.choice(['copy of ', '.', 'rank7.', 'rank0.', 'a/b/'])}{last}"] = files[name]
    elif what == 2:
        files[f"{place}/{r.choice(FOREIGN)}"] = r.choice([b"", b"x", b"{}", b"[]", b"\0" * 100, files[name],
                                                          b"\x1f\x8b"])
    elif what == 3:
        files[f"{place}/{r.choice(FOREIGN)}"] = files.pop(name)
    elif what == 4:
        files[name] = files[r.choice(list(files))]
    elif what == 5:
        files[name] = r.choice([b"", b"\n", b"{}", b"[]", b"null", b"\x1f\x8b", b"PK\x05\x06" + b"\0" * 18])
    else:
        files[f"{name}.gz" if r.random() < 0.5 else name.removesuffix(".gz")] = files.pop(name)


FOREIGN = ["README.md", "x.json", "context.json", "kineto.json", "kineto.json.gz", "et.json.gz", "graph.foretrace",
           "rank1.json", "rank00.json", "baseline.json", "campaign.json", "items.jsonl", "collectives.json",
           "rank0/kineto.json", ".hidden.json", "a\x1b[31m.json", "é.pt.trace.json", "x.parquet", "x.csv", "x.log",
           "kineto.1.json.gz", "rank1/context.json", "memory.json", "trace.pb", "window1.kineto.json.gz"]


def nothing(r: Random, data: bytes) -> bytes:
    """The file as it is."""
    return data


# Profiler traces ------------------------------------------------------------------------------------------------------

_TIMES = [0, 1, -1, 5, 500, 1e3, 1e6, 1e9, 1e15, 0.0005, 1e-9, 9.2e15, 9.3e18, 1700000000000000]
_KINDS = ["cpu_op", "kernel", "cuda_runtime", "gpu_memcpy", "gpu_memset", "user_annotation", "cuda_sync",
          "python_function",
          "cuda_driver", "gpu_user_annotation", "overhead", "ac2g", "Operator", "Kernel", "hip_runtime", "?"]
_CALLS = ["cudaLaunchKernel", "cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize",
          "cudaEventRecord",
          "cudaStreamWaitEvent", "cudaGraphLaunch", "cudaMemcpyAsync", "cudaMalloc", "cudaFree", "hipFree",
          "cudaMemcpy", "hipLaunchKernel", "cuLaunchKernel", "cudaEventQuery", "cudaLaunchHostFunc"]
_NAMES = ["ncclDevKernel_AllReduce_Sum_f32", "nccl:all_reduce", "Memcpy HtoD (Pageable -> Device)",
          "Memcpy DtoH (Device -> Pinned)", "Memcpy DtoD (Device -> Device)", "Memset (Device)", "ProfilerStep#2",
          "Optimizer.step#SGD.step", "aten::convolution", "aten::_scaled_dot_product_flash_attention", "aten::mm",
          "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", "aten::embedding_bag",
          "## forward ##", "nn.Module: Linear_0", "autograd::engine::evaluate_function: MmBackward0", "DDP.forward"]
_ARGUMENTS = ["correlation", "stream", "device", "External id", "Ev Idx", "Sequence number", "Fwd thread id",
              "Input Dims", "Input type", "Input Strides", "Concrete Inputs", "grid", "block", "bytes", "Group size",
              "Process Group Ranks", "Process Group Name", "In msg nelems", "Out msg nelems", "dtype",
              "Collective name", "wait_on_stream", "cuda_sync_kind", "registers per thread", "shared memory"]


def trace_events(r: Random, data: bytes) -> bytes:
    """A trace whose events still are events, but of an odd history."""
    packed = data[:2] == b"\x1f\x8b"
    tree = json.loads(gzip.decompress(data) if packed else data)
    events = tree if isinstance(tree, list) else tree["traceEvents"]
    for _ in range(r.choice([1, 1, 2, 3, 5, 10])):
        if not events:
            break
        _change_events(r, tree, events)
    text = to_json(tree)
    return gzip.compress(text, mtime=0) if packed else text


def _change_events(r: Random, tree: Any, events: list[Any]) -> None:
    at = r.randrange(len(events))
    event = events[at] if isinstance(events[at], dict) else {}
    args = event.setdefault("args", {}) if isinstance(event.get("args", {}), dict) else {}
    what = r.randrange(30)
    if what == 0:
        event["ts"] = near(r, event.get("ts", 0)) if r.random() < 0.5 else r.choice(_TIMES)
    elif what == 1:
        event["dur"] = r.choice(_TIMES)
    elif what == 2:
        _shift(event, r.choice([-1000, -100, -10, -1, 1, 10, 100, 1000]))
    elif what == 3:
        event["cat"] = r.choice(_KINDS)
    elif what == 4:
        event["name"] = r.choice(_CALLS + _NAMES + TEXTS)
    elif what == 5:
        args[r.choice(_ARGUMENTS)] = any_value(r)
    elif what == 6:
        name = r.choice(_ARGUMENTS)
        if name in args:
            args[name] = near(r, args[name])
    elif what == 7:
        event[r.choice(["pid", "tid"])] = r.choice([0, 1, 2, 7, 20, "x", -1, 1 << 40, None, "python 3"])
    elif what == 8:
        del events[at]
    elif what == 9:
        events.insert(r.randint(0, len(events)), json.loads(json.dumps(event, default=str)))
    elif what == 10:
        r.shuffle(events)
    elif what == 11:  # all of one kind gone
        kind = event.get("cat")
        events[:] = [e for e in events if not isinstance(e, dict) or e.get("cat") != kind]
    elif what == 12:  # steps: of no length, wholly elsewhere, one over all
        for each in events:
            if isinstance(each, dict) and str(each.get("name")).startswith("ProfilerStep"):
                each["dur"] = r.choice([0, 0, 1, 1e6, each.get("dur", 0)])
                if r.random() < 0.5:
                    _shift(each, r.choice([-400, 170, 435, 10_000]))
    elif what == 13:  # every event of a kind moved against the others
        kind, by = event.get("cat"), r.choice([-10_000, -300, -20, 20, 300, 10_000])
        for each in events:
            if isinstance(each, dict) and each.get("cat") == kind:
                _shift(each, by)
    elif what == 14:
        events.extend({"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 1000 + i, "ts": 1000 + i, "dur": 5,
                       "args": {"device": r.choice([0, 1]), "stream": 1000 + i, "correlation": i}}
                      for i in range(r.choice([3, 300])))
    elif what == 15:  # a call that spans a whole step
        step = next((e for e in events if isinstance(e, dict) and str(e.get("name")).startswith("ProfilerStep")), {})
        events.append({"ph": "X", "cat": "cuda_runtime", "name": r.choice(_CALLS), "pid": 1, "tid": 1,
                       "ts": step.get("ts", 0), "dur": step.get("dur", 0), "args": {"correlation": r.randrange(50)}})
    elif what == 16 and isinstance(tree, dict):
        tree["distributedInfo"] = {"backend": r.choice(["nccl", "gloo", 3]), "rank": r.choice(NUMBERS),
                                   "world_size": r.choice([0, 1, 2, 8, 30_000_000, 1 << 62, -1, "2"])}
    elif what == 17 and isinstance(tree, dict):
        change_tree(r, {k: v for k, v in tree.items() if k != "traceEvents"}, 1)
        tree[r.choice(["baseTimeNanoseconds", "deviceProperties", "schemaVersion", "traceName", "with_stack"])] = (
            any_value(r))
    elif what == 18:
        other = r.choice(events)
        if isinstance(other, dict):
            for key in ("ts", "dur", "tid", "name"):
                if r.random() < 0.5 and key in other:
                    event[key] = other[key]
    else:
        _change_all(r, events, event)


_PHASES = ["B", "E", "i", "M", "s", "f", "t", "C", "P", "b", "e", "x", "", None, 3]
_METADATA = ["process_name", "process_sort_index", "process_labels", "thread_name", "thread_sort_index"]


def _change_all(r: Random, events: list[Any], event: dict[str, Any]) -> None:
    """Change many events alike: other units, other forms of the same, an odd order, more of them."""
    what, dicts = r.randrange(11), [each for each in events if isinstance(each, dict)]
    if what == 0:  # times of another unit, or from another zero
        factor, offset = r.choice([1e-6, 1e-3, 1e3, 1e6, 1e9, 1, 1, 1, -1]), r.choice([0, 0, -10**6, 1.7e15, 1.7e18,
                                                                                       9.2e18])
        for each in dicts:
            for key in ("ts", "dur"):
                if isinstance(each.get(key), int | float):
                    each[key] = each[key] * factor + (offset if key == "ts" else 0)
    elif what == 1:  # of another type
        key, kind = r.choice(["ts", "dur", "tid", "pid", "name", "cat"]), r.choice([str, float, lambda value: [value]])
        for each in dicts:
            if key in each and not isinstance(each[key], list | dict):
                try:
                    each[key] = kind(each[key])
                except (TypeError, ValueError):
                    continue
    elif what == 2:
        key, value = r.choice(["ts", "dur", "tid", "pid", "name", "cat", "ph"]), r.choice([0, 1, "x", "", None, -5,
                                                                                           2.5])
        for each in dicts:
            each[key] = value
    elif what == 3:
        name = r.choice(_ARGUMENTS)
        value = any_value(r) if r.random() < 0.7 else 1
        for each in dicts:
            if isinstance(each.get("args"), dict) and (name in each["args"] or r.random() < 0.1):
                each["args"][name] = value
    elif what == 4:
        event["ph"] = r.choice(_PHASES)
    elif what == 5:
        events.append({"ph": "M", "name": r.choice(_METADATA), "pid": r.choice([0, 1, "x", None]), "tid": 0, "ts": 0,
                       "args": {r.choice(["name", "sort_index", "labels"]): any_value(r)}})
    elif what == 6:
        many = r.choice([2, 20])
        events += [json.loads(json.dumps(each, default=str)) for each in dicts[:400] for _ in range(many - 1)]
    elif what == 7:  # nested in itself, or one after the other without a gap
        kind = json.loads(json.dumps(event, default=str))
        start, length = (value if isinstance(value, int | float) else 0 for value in (kind.get("ts"), kind.get("dur")))
        nested = r.random() < 0.5
        events += [{**kind, "ts": start + (0 if nested else i * length), "dur": length} for i in range(r.choice([5,
                                                                                                                 700]))]
    elif what == 8:
        prefix = r.choice(["\x1b[2J", "\u202e", "é", "x" * 3000, "\x00", "\n", "aten::", "nccl", "%s"])
        for each in dicts:
            if isinstance(each.get("name"), str):
                each["name"] = prefix + each["name"]
    elif what == 9:
        events[:] = events[::-1] if r.random() < 0.5 else [each for i, each in enumerate(events) if i % 2]
    else:
        events.insert(r.randint(0, len(events)), any_value(r))


def _shift(event: dict[str, Any], by: float) -> None:
    if isinstance(event.get("ts"), int | float):
        event["ts"] += by


# Bytes and texts ------------------------------------------------------------------------------------------------------

def plain_bytes(r: Random, data: bytes) -> bytes:
    """Bytes flipped, cut, doubled, put in."""
    text = bytearray(data)
    for _ in range(r.choice([1, 1, 2, 5])):
        at = r.randint(0, max(len(text) - 1, 0))
        what = r.randrange(6)
        if what == 0 and text:
            text[at] = r.randrange(256)
        elif what == 1:
            del text[at:]
        elif what == 2:
            del text[at:at + r.randint(1, 64)]
        elif what == 3:
            text[at:at] = text[at:at + r.randint(1, 200)]
        elif what == 4:
            text[at:at] = r.choice([b'"', b"\\", b"{", b"}", b"[", b"]", b",", b"\0", b"\xff", b"\n", b"1e9999", b"},{",
                                    b"\xef\xbb\xbf", b"\x1f\x8b", b"PK\x03\x04", b"9" * 5000, b"[" * 3000])
        else:
            del text[:at]
    return bytes(text)


def gzip_bytes(r: Random, data: bytes) -> bytes:
    """A gzip whose stream, or whose text, is damaged."""
    if r.random() < 0.4:
        return plain_bytes(r, data)
    try:
        text = gzip.decompress(data)
    except (OSError, EOFError, zlib.error):
        return plain_bytes(r, data)
    return gzip.compress(plain_bytes(r, text), mtime=0)


def gzip_odd(r: Random, data: bytes) -> bytes:
    """A gzip that is none, several, cut off, one in another, of odd headers, or far longer than it looks."""
    text = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    what = r.randrange(9)
    if what == 0:
        return data[:r.randint(0, len(data))]
    if what == 1:
        return data + r.choice([data, b"\0" * 50, b"junk", data[:20], gzip.compress(b"", mtime=0)])
    if what == 2:
        return gzip.compress(gzip.compress(text, mtime=0), mtime=0)
    if what == 3:
        return b"\x1f\x8b\x08" + bytes([r.randrange(256)]) + data[4:]
    if what == 4:
        return data[:-8] + r.choice([b"\0" * 8, b"\xff" * 8, b""])
    if what == 5:
        return gzip.compress(r.choice([b" ", b"\n", b"[", b"{", b"0"]) * r.choice([0, 1, 10**5, 10**7]), mtime=0)
    if what == 6:
        return gzip.compress(text[:-2] + b" " * r.choice([10**4, 10**7]) + text[-2:], mtime=0)
    if what == 7:
        return zlib.compress(text)
    return text


def gzip_json(r: Random, data: bytes) -> bytes:
    """A gzipped JSON file with parts of its tree changed."""
    return gzip.compress(json_tree(r, gzip.decompress(data)), mtime=0)


def log_text(r: Random, data: bytes) -> bytes:
    """A log: words replaced, lines dropped, doubled, swapped."""
    lines = data.decode("utf-8", "replace").split("\n")
    for _ in range(r.choice([1, 1, 2, 4])):
        at = r.randrange(len(lines))
        words = lines[at].split(" ")
        what = r.random()
        if what < 0.7:
            filled = [i for i, word in enumerate(words) if word]
            if filled:
                words[r.choice(filled)] = _cell(r)
                lines[at] = " ".join(words)
        elif what < 0.8:
            lines.insert(r.randint(0, len(lines)), lines[at])
        elif what < 0.9 and len(lines) > 1:
            del lines[at]
        else:
            r.shuffle(lines)
    return "\n".join(lines).encode("utf-8", "surrogatepass")


def _cell(r: Random) -> str:
    return str(r.choice([*NUMBERS, "nan", "inf", "-inf", "", "x", "1e400", "-5", "#", '"', "8,388", *TEXTS,
                         "9" * 5000]))


def table_text(separator: str) -> Mutator:
    """Cells, rows and columns of a text table changed."""
    def mutate(r: Random, data: bytes) -> bytes:
        rows = [line.split(separator) for line in data.decode("utf-8", "replace").splitlines()]
        for _ in range(r.choice([1, 1, 2, 4])):
            row = r.choice(rows)
            at = r.randrange(len(row)) if row else 0
            what = r.random()
            if what < 0.5 and row:
                row[at] = _cell(r)
            elif what < 0.65:  # a whole column
                value = _cell(r)
                for each in rows[1:]:
                    if at < len(each):
                        each[at] = value
            elif what < 0.75:  # a column less
                for each in rows:
                    del each[at:at + 1]
            elif what < 0.85:
                row.append(_cell(r))
            elif what < 0.9:
                rows.append(list(row))
            elif len(rows) > 2:
                del rows[r.randrange(len(rows))]
        return ("\n".join(separator.join(row) for row in rows) + "\n").encode("utf-8", "surrogatepass")
    return mutate


@lru_cache(maxsize=8)
def _many_rows(data: bytes, rows: int) -> bytes:
    """The table's first row very often, which a dictionary stores in next to nothing."""
    import pyarrow
    import pyarrow.parquet as parquet

    table = parquet.read_table(io.BytesIO(data))
    first = {name: table.column(name)[0] for name in table.column_names}
    stream = io.BytesIO()
    many = pyarrow.table({name: pyarrow.repeat(value, rows) for name, value in first.items()})
    parquet.write_table(many, stream, compression="zstd", use_dictionary=True)
    return stream.getvalue()


def parquet_table(r: Random, data: bytes) -> bytes:
    """Cells and columns of a Parquet table changed; now and then its bytes, or very many rows."""
    what = r.random()
    if what < 0.15:
        return plain_bytes(r, data)
    if what < 0.155:
        return _many_rows(data, 1_000_000)
    if what < 0.35:
        return _retyped(r, data)
    import pandas

    frame = pandas.read_parquet(io.BytesIO(data))
    for _ in range(r.choice([1, 1, 2])):
        name = r.choice(list(frame.columns))
        what = r.random()
        if what < 0.3:
            column = list(frame[name])
            column[r.randrange(len(column))] = r.choice([float("nan"), float("inf"), 0, -1, 1e300, None, 1 << 40])
            frame[name] = pandas.Series(column, dtype=object).infer_objects() if all(
                isinstance(v, int | float) for v in column) else pandas.Series([str(v) for v in column])
        elif what < 0.6:
            frame[name] = r.choice([0, -1, float("nan"), float("inf"), "x", "", 1e300, 1 << 40, True])
        elif what < 0.8 and len(frame.columns) > 1:
            frame = frame.drop(columns=name)
        elif what < 0.9:
            frame = frame.iloc[:r.choice([0, 1])]
        else:
            frame = frame.rename(columns={name: f"{name}x"})
    stream = io.BytesIO()
    frame.to_parquet(stream)
    return stream.getvalue()


_LIMITS: list[Any] = ["((64, -1), (128, 256))", f"((64, {10**30}), ({10**30}, 256))", "()", "((64, 128),)", "[nan]",
                      "9" * 400, None, 0, -1, 1 << 40, (1 << 63) - 1, -(1 << 63), float("nan"), float("inf"), 1e308,
                      "x", "",
                      "1", "é",
                      "\x1b[31m", "9" * 5000, True, [1, 2], [], {"a": 1}, b"\xff"]


def _retyped(r: Random, data: bytes) -> bytes:
    """A Parquet table with columns of other types than they should have, twice, empty, of nothing, or nested."""
    import pyarrow.parquet as parquet

    table = parquet.read_table(io.BytesIO(data))
    if r.random() < 0.3:
        table = table.replace_schema_metadata(r.choice([None, {"pandas": "{"}, {"pandas": "{}"}, {"x": "é"}]))
    for _ in range(r.choice([1, 1, 2, 4])):
        if table.num_columns:
            table = _changed_table(r, table)
    stream = io.BytesIO()
    parquet.write_table(table, stream)
    return stream.getvalue()


def _changed_table(r: Random, table: Any) -> Any:
    at, what = r.randrange(table.num_columns), r.randrange(8)
    name, column = table.column_names[at], table.column(at)
    if what == 0:
        return table.append_column(name, column)
    if what == 1:
        return table.slice(0, r.choice([0, 1]))
    if what == 2:
        return table.remove_column(at)
    if what == 3:
        new = str(any_value(r))[:300]
        return table.rename_columns([new if i == at else each for i, each in enumerate(table.column_names)])
    return table.set_column(at, name, _changed_column(r, column))


def _changed_column(r: Random, column: Any) -> Any:
    import pyarrow

    what, values = r.randrange(7), column.to_pylist()
    if what == 0:
        return pyarrow.array([r.choice(_LIMITS)] * len(values))
    if what == 1:
        return pyarrow.nulls(len(values))
    if what == 2:
        return column.dictionary_encode()
    if what == 3:
        return pyarrow.array([[value] for value in values])
    if what == 4:
        return pyarrow.array([{"x": value} for value in values])
    if what == 5 and values:
        values[r.randrange(len(values))] = r.choice(_LIMITS)
        try:
            return pyarrow.array(values)
        except (pyarrow.ArrowException, TypeError, OverflowError):
            return pyarrow.array(list(map(str, values)))
    kind = r.choice(["string", "float64", "float32", "int8", "int64", "uint64", "bool_", "large_string", "binary",
                     "date32"])
    try:
        return column.cast(getattr(pyarrow, kind)(), safe=False)
    except pyarrow.ArrowException:
        return pyarrow.nulls(len(values))


def toml_text(r: Random, data: bytes) -> bytes:
    """TOML: values, keys and lines changed."""
    lines = data.decode("utf-8", "replace").splitlines()
    for _ in range(r.choice([1, 1, 2])):
        at = r.randrange(len(lines))
        key, equals, _value = lines[at].partition("=")
        what = r.random()
        if what < 0.6 and equals:
            lines[at] = f"{key}= " + r.choice([
                "0", "-1", "nan", "inf", "-inf", "true", '""', '"x"', "[]", "{}", "[1, \"a\"]", "9223372036854775808",
                "9" * 5000, "9" * 400, "1e400", "[" * 3000, "[" * 500 + "]" * 500, "{a=" * 800 + "1" + "}" * 800,
                '"\\u0000"',
                "1979-05-27", '"' + "x" * 70_000 + '"', '"""', "[nan]", "[16, -1]", "1_000_000_000", '"\\ud800"'])
        elif what < 0.7:
            lines.insert(r.randint(0, len(lines)), lines[at])
        elif what < 0.8 and len(lines) > 1:
            del lines[at]
        elif what < 0.9:
            lines[at] = lines[at].replace(key.strip() or "name", r.choice(["x", "a.b.c", '"\x00"', "dp", "tp",
                                                                           "family"]))
        else:
            return plain_bytes(r, "\n".join(lines).encode())
    return ("\n".join(lines) + "\n").encode("utf-8", "surrogatepass")


def toml_tree(r: Random, data: bytes) -> bytes:
    """TOML with parts of its tree changed."""
    from tracer.input_file import from_toml

    tree = change_tree(r, from_toml(data))
    return "".join(_toml_lines(tree if isinstance(tree, dict) else {"x": tree}, "")).encode("utf-8", "surrogatepass")


def _toml_lines(table: dict[str, Any], path: str) -> list[str]:
    found, inner = [], []
    for key, value in table.items():
        name = json.dumps(str(key))
        if isinstance(value, dict) and not path.count("."):
            inner += [f"[{path}{name}]\n", *_toml_lines(value, f"{path}{name}.")]
        else:
            found.append(f"{name} = {_toml_value(value)}\n")
    return found + inner


def _toml_value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(str(k))} = {_toml_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    if isinstance(value, _Raw):
        return str(value)
    return "nan" if value is None else json.dumps(value)


# Containers -----------------------------------------------------------------------------------------------------------

def graph_file(r: Random, data: bytes) -> bytes:
    """A saved graph or job with its manifest or its tables changed, sealed again."""
    if r.random() < 0.15:
        return plain_bytes(r, data)
    from tracer.store.container import MANIFEST, pack, unpack

    members = unpack(data, "seed")
    if r.random() < 0.85 or len(members) == 1:
        tree = json.loads(members[MANIFEST])
        if r.random() < 0.6:
            _change_columns(r, tree)
        else:
            change_tree(r, tree)
        members[MANIFEST] = to_json(tree)
    else:
        name = r.choice([name for name in members if name != MANIFEST])
        members[name] = (_parquet_columns if r.random() < 0.7 else _retyped)(r, members[name])
    return pack(members)


def _change_columns(r: Random, tree: Any) -> None:
    """Numbers in a graph's tables: what a damaged or a hand-made file may hold."""
    table = r.choice(list(r.choice(tree["graphs"])["tables"].values()))
    for _ in range(r.choice([1, 2, 4])):
        inline, constants = table.get("inline", {}), table.get("constants", {})
        if inline and r.random() < 0.7:
            column = inline[r.choice(list(inline))]
            if column:
                at = r.randrange(len(column))
                column[at] = r.choice([0, -1, -2, 1, len(column), column[at] + 1, -column[at], 1 << 40, 1 << 62,
                                       (1 << 63) - 1, column[r.randrange(len(column))]])
        elif constants:
            name = r.choice(list(constants))
            constants[name] = r.choice([0, -1, 1, 3, 127, 1 << 20, 1 << 62, -(1 << 62)])


def _parquet_columns(r: Random, data: bytes) -> bytes:
    if r.random() < 0.3:
        return plain_bytes(r, data)
    import pyarrow
    import pyarrow.parquet as parquet

    table = parquet.read_table(io.BytesIO(data))
    columns = {name: table.column(name).to_pylist() for name in table.column_names}
    types = {name: table.column(name).type for name in table.column_names}
    name = r.choice(list(columns))
    values = columns[name]
    if values and isinstance(values[0], int):
        for _ in range(r.choice([1, 5])):
            values[r.randrange(len(values))] = r.choice([0, -1, 1, len(values), 120, 100_000])
    elif values:
        values[r.randrange(len(values))] = r.choice(TEXTS)
    try:
        changed = pyarrow.table({n: pyarrow.array(v, types[n]) for n, v in columns.items()})
    except (pyarrow.ArrowException, OverflowError):
        return data
    changed = changed.cast(pyarrow.schema([field.with_nullable(False) for field in changed.schema]))
    stream = io.BytesIO()
    parquet.write_table(changed, stream, use_dictionary=False, store_schema=False, write_statistics=False)
    return stream.getvalue()


def zip_odd(r: Random, data: bytes) -> bytes:
    """A container whose zip is odd: members twice, elsewhere, encrypted, by other methods, far longer than stored."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = [(name, archive.read(name)) for name in archive.namelist()]
        comment = archive.comment
    what = r.randrange(8)
    method, flags = zipfile.ZIP_DEFLATED, 0
    if what == 0:
        members.insert(r.randint(0, len(members)), r.choice(members))
    elif what == 1:
        name = r.choice(["../../x.json", "/etc/x", "a/" * 200 + "b", "", "\x1b[31m", "\u202e.json", "x" * 60_000])
        members.append((name, b"{}"))
    elif what == 2:
        at = r.randrange(len(members))
        members[at] = (members[at][0], members[at][1] + b"\0" * r.choice([10**5, 10**7]))
    elif what == 3:
        method = r.choice([zipfile.ZIP_STORED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
    elif what == 4:
        members = members[::-1]
    elif what == 5:
        members += [(f"m{i}.npy", b"") for i in range(r.choice([1, 3000]))]
    elif what == 6:
        flags = r.choice([1, 8, 0x800, 0x41])
    else:
        members = members[:r.choice([0, 1])]
    stream = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(stream, "w") as archive:
        warnings.simplefilter("ignore")
        for name, content in members:
            archive.writestr(zipfile.ZipInfo(name), content, method)
        archive.comment = comment
    body = bytearray(stream.getvalue())
    if flags:  # in the directory, which is what is believed
        at = body.find(b"PK\x01\x02")
        while at >= 0:
            body[at + 8:at + 10] = flags.to_bytes(2, "little")
            at = body.find(b"PK\x01\x02", at + 4)
    return bytes(body[:-8]) + f"{zlib.crc32(bytes(body[:-8])):08x}".encode()


def profile_file(r: Random, data: bytes) -> bytes:
    """A device profile with its manifest or its arrays changed, sealed again."""
    if r.random() < 0.1:
        return plain_bytes(r, data)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
        comment = archive.comment
    arrays = [name for name in members if name.endswith(".npy")]
    if arrays and r.random() < 0.5:
        for _ in range(r.choice([1, 1, 3])):
            name = r.choice(arrays)
            members[name] = _array(r, members[name])
    else:
        name = next(name for name in members if name.endswith(".json"))
        members[name] = json_tree(r, members[name])
    if r.random() < 0.05:
        members.pop(r.choice(list(members)))
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)  # of no time of day
        archive.comment = comment[:-8] + b"0" * 8
    body = stream.getvalue()[:-8]
    return body + f"{zlib.crc32(body):08x}".encode()


def _array(r: Random, data: bytes) -> bytes:
    what = r.randrange(8)
    if what == 0:
        return plain_bytes(r, data)
    try:
        found = np.load(io.BytesIO(data), allow_pickle=False)
    except (ValueError, EOFError, OSError, SyntaxError):
        return data
    if what == 1:  # a header that claims more than there is
        shape = r.choice([(10**11,), (10**6, 10**6), (-1,), (0,), (1 << 62,), (3,) * 40])
        stream = io.BytesIO()
        np.lib.format.write_array_header_1_0(stream, {"descr": r.choice(["<f8", "<i8", "|O", "<U9", "|V8"]),
                                                      "fortran_order": False, "shape": shape})
        return stream.getvalue() + data[-64:]
    if what == 2:  # a header that is none
        head = r.choice([b"{'descr': '<f8', 'fortran_order': False, 'shape': (", b"(" * 3000, b"{'descr'", b"\xff\xfe",
                         b"lambda: 0", b"'''", b"{'shape':(1,),'descr':'<f8','fortran_order':0x}"])
        return b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head
    with np.errstate(all="ignore"):
        if found.size and what in (3, 4):
            found = found.copy()
            flat = found.reshape(-1)
            flat[r.randrange(len(flat))] = np.array(r.choice(
                [float("nan"), float("inf"), 0, -1, 1e300, 3, 1 << 15] if found.dtype.kind == "f" else
                [0, 1, 3, 100])).astype(found.dtype)
        elif what == 5:
            found = found.astype(r.choice(["f4", "i8", "f8", "u1", "c16", "U3"]))
        elif what == 6:
            found = found.reshape(-1)[:r.choice([0, 1, max(found.size - 1, 0)])]
        else:
            found = np.zeros(r.choice([(0,), (1,), (5000, 1000), (2, 2, 2)]), found.dtype)
    stream = io.BytesIO()
    np.save(stream, found, allow_pickle=False)
    return stream.getvalue()
