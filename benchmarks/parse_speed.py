"""How fast and in how much memory a 1.3-million-event trace is read, next to a generic JSON decoder and peers.

    python benchmarks/parse_speed.py [TRACE] [--events 1300000] [--keep BIG.json]

TRACE (default: the environment's FORETRACE_BENCH_TRACE, else rank 3 of 8 A100 in the shared data) is repeated with
shifted times, step numbers and correlations until the file has that many events. Every reader runs in a process of its
own, pinned to one core where the system allows it, three times; the best time counts. Peak memory is the process's
maximum resident set, of which the interpreter with its imports is shown apart.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(os.environ.get("FORETRACE_DATA", ROOT.parent / "shared" / "data"))
DEFAULT = DATA / "traces" / "rank3-of-8xA100-6steps" / "rank3.kineto.json.gz"

_NUMBERS = re.compile(rb'"(ts|correlation|id|External id)": (\d+)|ProfilerStep#(\d+)')

READERS = {
    "foretrace": "from tracer.kineto import read_kineto\n"
                 "def read(path): return read_kineto(path).meta.loss.events_read",
    "json.loads": "import json\n"
                  "def read(path): return len(json.loads(open(path, 'rb').read())['traceEvents'])",
    "HolisticTraceAnalysis": "from hta.common.trace_parser import parse_trace_dataframe\n"
                             "from hta.configs.parser_config import ParserConfig\n"
                             "def read(path): return len(parse_trace_dataframe(path, "
                             "ParserConfig.get_default_cfg())[1])",
    "TraceLens": "from TraceLens import TreePerfAnalyzer\n"
                 "def read(path): return len(TreePerfAnalyzer.from_file(path).tree.events)",
}
_NEEDS = {"HolisticTraceAnalysis": "hta", "TraceLens": "TraceLens"}

_CHILD = """
import json, os, resource, sys, time
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {{sorted(os.sched_getaffinity(0))[0]}})
{code}
def peak():
    # Linux's ru_maxrss survives exec and so shows the parent's size; VmHWM does not.
    try:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
base = peak()
start, cpu = time.perf_counter(), time.process_time()
events = read({path!r})
print("RESULT", json.dumps([events, time.perf_counter() - start, time.process_time() - cpu, base, peak()]))
"""


def build(source: Path, events: int, target: Path) -> tuple[int, int]:
    """Write the repeated trace; returns (events, bytes)."""
    raw = source.read_bytes()
    text = gzip.decompress(raw) if raw.startswith(b"\x1f\x8b") else raw
    value = json.loads(text)
    recorded = value if isinstance(value, list) else value["traceEvents"]
    times = [event["ts"] for event in recorded if event.get("ph") == "X" and event.get("cat") != "Trace"]
    shift = int(max(times) - min(times)) + 1_000_000
    ids = max((event.get("args", {}).get("correlation", 0) for event in recorded), default=0) + 1
    opening = re.search(rb'"traceEvents"\s*:\s*\[|^\s*\[', text)
    assert opening is not None
    # The events end where the last event's closing brace is; what follows closes the file.
    end = text.rindex(b"}", 0, text.rindex(b"]"))
    head, body, tail = text[:opening.end()], text[opening.end():end + 1], text[end + 1:]
    copies = max(1, -(-events // len(recorded)))
    with target.open("wb") as out:
        out.write(head)
        for copy in range(copies):
            def moved(match: re.Match[bytes], copy: int = copy) -> bytes:
                if match[3]:
                    return b"ProfilerStep#%d" % (int(match[3]) + 1000 * copy)
                return b'"%s": %d' % (match[1], int(match[2]) + copy * (shift if match[1] == b"ts" else ids))
            out.write(_NUMBERS.sub(moved, body) if copy else body)
            out.write(b"," if copy < copies - 1 else b"")
        out.write(tail)
    return copies * len(recorded), target.stat().st_size


def measure(name: str, path: Path, repeats: int) -> list[float] | str:
    """[events, seconds, CPU seconds, base bytes, peak bytes] of the fastest run, or why there is none."""
    if name in _NEEDS and importlib.util.find_spec(_NEEDS[name]) is None:
        return "not installed"
    best: list[float] | None = None
    limits = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL", "NUMBA")}
    environment = os.environ | limits | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    for _ in range(repeats):
        done = subprocess.run([sys.executable, "-c", _CHILD.format(code=READERS[name], path=str(path))],
                              capture_output=True, text=True, env=environment, check=False)
        line = next((text for text in done.stdout.splitlines() if text.startswith("RESULT ")), None)
        if line is None:
            return f"failed: {(done.stderr.strip().splitlines() or ['no output'])[-1][:90]}"
        result = json.loads(line.removeprefix("RESULT "))
        if best is None or result[1] < best[1]:
            best = result
    assert best is not None
    return best


def main() -> int:
    """Build the file, measure every reader, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", nargs="?", type=Path, default=Path(os.environ.get("FORETRACE_BENCH_TRACE", DEFAULT)))
    parser.add_argument("--events", type=int, default=1_300_000)
    parser.add_argument("--keep", type=Path, help="write the big file here and leave it")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", help="comma-separated readers")
    options = parser.parse_args()
    if not options.trace.exists():
        print(f"{options.trace} does not exist; name a trace, or set FORETRACE_DATA.", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        big = options.keep or Path(folder) / "big.json"
        events, size = build(options.trace, options.events, big)
        print(f"{events:,} events, {size / 1e6:,.0f} MB of text, from {options.trace.name}; target: 3 us/event, 3x\n")
        print(f"{'reader':24}{'seconds':>9}{'us/event':>10}{'cpu s':>8}{'peak MB':>9}{'x text':>8}{'imports MB':>12}")
        for name in options.only.split(",") if options.only else READERS:
            result = measure(name, big, options.repeats if name == "foretrace" else 1)
            if isinstance(result, str):
                print(f"{name:24}{result}")
                continue
            _, seconds, cpu, base, peak = result
            print(f"{name:24}{seconds:9.2f}{seconds / events * 1e6:10.2f}{cpu:8.2f}{peak / 1e6:9.0f}{peak / size:8.2f}"
                  f"{base / 1e6:12.0f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
