"""Every model of a library traced by shapes and priced, each counted.

    python benchmarks/library_models.py CACHE --library torchvision [--part 0/2] [--most 100] [--only resnet18]
    python benchmarks/library_models.py CACHE --table

Models come in the order of a hash of their names, so that a part of them is a fair sample; what was counted stays in
CACHE, a file a model. A step that cannot be traced is run by PyTorch on the CPU with the same inputs where that is
small enough: what does not run there either is counted apart. Needs the library; downloads nothing.
"""

from __future__ import annotations

import argparse
import warnings
from collections import Counter
from pathlib import Path

from library_parts.cases import LibraryCase
from library_parts.outcomes import Outcome, count_all, outcomes_in, reason_class


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cache", type=Path)
    parser.add_argument("--library", choices=("torchvision", "transformers", "timm"))
    parser.add_argument("--kind", choices=("train", "infer", "generate"))
    parser.add_argument("--part", default="0/1", help="the how manieth of how many parts to count")
    parser.add_argument("--most", type=int, help="models at most")
    parser.add_argument("--only", nargs="*", help="names of models")
    parser.add_argument("--again", action="store_true", help="count again what was not traced")
    parser.add_argument("--table", action="store_true", help="only print what was counted")
    given = parser.parse_args()
    if given.library and not given.table:
        warnings.filterwarnings("ignore")
        cases = cases_of(given.library)
        first, parts = map(int, given.part.split("/"))
        names = sorted({case.name: case for case in cases}.values(), key=lambda case: case.order)
        some = {case.name for case in names[first::parts][:given.most]} & set(given.only or [c.name for c in cases])
        count_all(sorted((case for case in cases if case.name in some and given.kind in (None, case.kind)),
                         key=lambda case: (case.order, case.kind)), given.cache, given.again)
    print_table(outcomes_in(given.cache))


def cases_of(library: str) -> list[LibraryCase]:
    """Every case of a library, in any order."""
    if library == "torchvision":
        from library_parts.torchvision_cases import torchvision_cases

        return torchvision_cases()
    if library == "transformers":
        from library_parts.transformers_cases import transformers_cases

        return transformers_cases()
    from library_parts.timm_cases import timm_cases

    return timm_cases()


def print_table(outcomes: list[Outcome]) -> None:
    """Print what was counted by library and kind, the operations that no family knows, and the failures by reason."""
    print(f"{'library':<14}{'kind':<9}{'cases':>6}{'by themselves':>15}{'traced':>8}{'':>8}{'assumed':>9}{'priced':>8}"
          f"{'unknown, of time':>18}{'worst':>8}")
    for library, kind in sorted({(one.library, one.kind) for one in outcomes}):
        some = [one for one in outcomes if (one.library, one.kind) == (library, kind)]
        running = [one for one in some if one.status != "not by itself"]
        traced = [one for one in running if one.status == "traced"]
        assumed = sum(any("taken to select" in note or "taken to fill" in note for note in one.notes) for one in traced)
        priced = [one for one in traced if not one.reason]
        shares = [sum(one.unknown_us.values()) / one.time_us for one in priced if one.time_us]
        mean, worst = (sum(shares) / len(shares), max(shares)) if shares else (0.0, 0.0)
        print(f"{library:<14}{kind:<9}{len(some):>6}{len(running):>15}{len(traced):>8}"
              f"{len(traced) / max(len(running), 1):>8.1%}{assumed:>9}{len(priced):>8}{mean:>18.2%}{worst:>8.1%}")
    unknown: Counter[str] = Counter()
    for one in outcomes:
        for name, time_us in one.unknown_us.items():
            unknown[name] += time_us / one.time_us
    print("\nOperations without a family (sum over models of their share of device time)")
    for name, share in unknown.most_common(25):
        models = sum(name in one.unknown_us for one in outcomes)
        print(f"  {name:<60}{share:>8.3f} in {models} steps")
    for status, title in (("failed", "Not traced"), ("unchecked", "Not traced, too large to be run for comparison"),
                          ("not by itself", "Does not run by itself with these inputs")):
        some = [one for one in outcomes if one.status == status]
        print(f"\n{title}: {len(some)}")
        reasons = Counter(reason_class(one.reason) for one in some)
        for reason, count in reasons.most_common():
            print(f"  {count:>4} {reason}")
        for one in some:
            print(f"    {one.library} {one.kind} {one.name}: {one.reason[:330]}")


if __name__ == "__main__":
    main()
