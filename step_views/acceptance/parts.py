"""The parts of the acceptance run, and their sizes on a GPU, on a CPU and in tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple


class AcceptancePart(NamedTuple):
    """A part: its number and title, and the module and generator ``function`` that yields its points. ``gpu_s`` and
    ``cpu_s`` are the longest times it may take, in seconds. ``leaves`` are patterns of the file names in its folder;
    ``after`` are the parts whose files it reads."""

    number: int
    title: str
    module: str
    function: str
    gpu_s: float
    cpu_s: float
    leaves: tuple[str, ...] = ()
    after: tuple[int, ...] = ()


_FIVE = ("llama", "resnet50", "bert", "dlrm", "lstm")
PARTS = (
    AcceptancePart(0, "names, rights, versions", "machine", "machine", 90, 90),
    AcceptancePart(1, "units: clocks, caches, events", "units", "units", 120, 30),
    AcceptancePart(2, "captures of five models", "captures", "captures", 240, 240, (*_FIVE, "gpt2")),
    AcceptancePart(3, "sizes and variants that were never recorded", "predictions", "predictions", 300, 400,
                   ("batch=*", "measured.json")),
    AcceptancePart(4, "calibration", "calibration", "calibration", 540, 240, ("measurements", "device.profile")),
    AcceptancePart(5, "predictions with the calibrated profile", "predictions", "with_profile", 150, 200, (), (3, 4)),
    AcceptancePart(6, "unusual programs", "programs", "programs", 360, 300, ("*-cpu", "*-cuda", "snapshot.pickle")),
    AcceptancePart(7, "collectives, and the host", "collectives", "collectives", 240, 300, ("job", "host.gz*")),
)

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class AcceptanceScale:
    """Sizes and conditions of an acceptance run.

    Attributes:
        device: "cuda" or "cpu".
        models: workloads of part 2, with their settings, including "preset".
        own_clock: largest allowed difference of a recorded step from the program's clock, as a share.
        workload, fixed: the workload of parts 3 and 5, and its fixed settings.
        captured, unseen: its sizes that are recorded, and those that are predicted. No size equals another dimension's,
            because one capture could not tell them apart.
        variants: by name of an edit: its value, and settings of the workload that really make the same change.
        mape, worst, covered: limits for these predictions: mean and largest error, and coverage.
        minutes, families: for the calibration; no families mean all.
        measurements, family_median, products: limits for the calibration: fewest measurements of a family, largest
            median error of a family, and largest bias of products in steps.
        host_minutes: for the host's calibration.
    """

    device: str
    models: Mapping[str, Settings]
    own_clock: float
    workload: str
    fixed: Settings
    captured: tuple[Settings, ...]
    unseen: tuple[Settings, ...]
    variants: Mapping[str, tuple[Any, Settings]]
    mape: float
    worst: float
    covered: float
    minutes: float
    families: tuple[str, ...]
    measurements: int
    family_median: float
    products: float
    host_minutes: float

    @property
    def is_cuda(self) -> bool:
        """Whether the run is for a GPU."""
        return self.device == "cuda"


JUDGED = ("gemm", "attention", "norm", "elementwise")
"""Families whose errors part 4 judges: most of a transformer's step."""
_VARIANTS: dict[str, tuple[Any, Settings]] = {
    "dtype": ("bf16", {"dtype": "bf16-autocast"}), "compile": (True, {"compile": True}),
    "fused-optimizer": (True, {"optimizer": "adamw-fused"})}

SCALES = {
    "cuda": AcceptanceScale(
        "cuda", {name: {"preset": "real"} for name in _FIVE}, 0.01, "llama",
        {"width": 1024, "depth": 8, "heads": 16, "kv_heads": 8, "hidden": 2816, "vocabulary": 32000, "dtype": "tf32"},
        ({"batch": 6, "seq": 640}, {"batch": 12, "seq": 1152}),
        ({"batch": 10, "seq": 640}, {"batch": 6, "seq": 1152}, {"batch": 10, "seq": 896}, {"batch": 24, "seq": 1152}),
        _VARIANTS, 0.08, 0.2, 0.7, 8.0, (), 16, 0.1, 0.05, 1.0),
    "cpu": AcceptanceScale(
        "cpu", {name: {"preset": "tiny"} for name in _FIVE}, 0.05, "llama", {"width": 128, "depth": 2},
        ({"batch": 3, "seq": 48}, {"batch": 9, "seq": 96}),
        ({"batch": 6, "seq": 48}, {"batch": 3, "seq": 96}, {"batch": 6, "seq": 72}, {"batch": 12, "seq": 96}),
        _VARIANTS, 0.15, 0.4, 0.5, 1.5, JUDGED, 8, 0.25, 0.3, 0.5),
    "tiny": AcceptanceScale(
        "cpu", {"gpt2": {"preset": "tiny"}}, 0.5, "gpt2", {"width": 32, "depth": 1, "heads": 2, "vocabulary": 100},
        ({"batch": 2, "seq": 16},), ({"batch": 4, "seq": 16},), {}, 10.0, 10.0, 0.0, 1.0, ("elementwise",), 1, 10.0,
        10.0, 0.2),
}
"""Scales by name. Limits are wider on a CPU, where other work disturbs times, and which is not a target."""
