"""The branches that two runs of the tests took: those that only the first took are named.

    make coverage COVERAGE=before.json                # at an older commit
    make coverage COVERAGE=after.json
    python ci/branches.py before.json after.json

Reads what slipcover wrote; several files with commas between them are parts of one run. Which branches are taken
depends a little on the machine: on what a cache keeps, on how busy the machine is, and on modules that were imported
before the measurement began. Exits with 1 where more than ``MOST_LOST`` are lost.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path

MOST_LOST = 0.005
"""Share of the first run's branches that may be missing in the second: two runs of one commit differ by as many."""


def taken(paths: str) -> dict[str, set[tuple[int, int]]]:
    """Return the branches (from line, to line) of each file that any of some runs took."""
    found: dict[str, set[tuple[int, int]]] = defaultdict(set)
    for path in paths.split(","):
        for name, file in json.loads(Path(path).read_text())["files"].items():
            found[name].update((begin, end) for begin, end in file.get("executed_branches", ()))
    return found


def main(before: str, after: str) -> int:
    """Print the figures by file and in all."""
    old, new = taken(before), taken(after)
    lost = {name: rows for name in sorted(old) if (rows := old[name] - new.get(name, set()))}
    for name, rows in lost.items():
        lines = ", ".join(map(str, sorted({row for row, _ in rows})))
        sys.stdout.write(f"{name}: {len(rows)} no longer taken, from lines {lines}\n")
    number, missing = sum(map(len, old.values())), sum(map(len, lost.values()))
    won = sum(len(rows - old.get(name, set())) for name, rows in new.items())
    sys.stdout.write(f"{number:,} branches before, {missing:,} of them no longer taken ({missing / number:.2%}), "
                     f"{won:,} new ones\n")
    return int(missing > MOST_LOST * number)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
