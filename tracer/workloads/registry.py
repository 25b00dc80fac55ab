"""The registry of workloads, their settings, and the split of configurations into fitted and held out.

Imports no torch; ``build`` does, when it is called.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

from tracer.workloads import catalogue
from tracer.workloads.settings import PRESETS, Setting, Settings, WorkloadError, parse_assignments

if TYPE_CHECKING:
    from tracer.workloads.workload import Workload

HELD_OUT_ONE_IN = 3
"""One of this many configurations is held out."""

_SETTINGS: dict[str, type[Settings]] = {
    kind.WORKLOAD: kind
    for kind in (
        catalogue.DlrmSettings, catalogue.ResnetSettings, catalogue.BertSettings, catalogue.Gpt2Settings,
        catalogue.LlamaSettings, catalogue.VitSettings, catalogue.MoeSettings, catalogue.UnetSettings,
        catalogue.LstmSettings, catalogue.DeepfmSettings, catalogue.DcnSettings, catalogue.NcfSettings,
    )
}


@dataclass(frozen=True)
class WorkloadInfo:
    """One workload as ``foretrace workloads`` shows it.

    Attributes:
        settings: every setting with its default, sizes first.
        presets: the settings that each preset (``default``, ``tiny``, ``real``) changes.
    """

    name: str
    summary: str
    settings: tuple[Setting, ...]
    presets: dict[str, dict[str, Any]]


def names() -> list[str]:
    """Return the names of the workloads, in listing order."""
    return list(_SETTINGS)


def describe() -> list[WorkloadInfo]:
    """Return every workload with its settings and presets."""
    found = []
    for name, kind in _SETTINGS.items():
        listed = kind.listed()
        defaults = {setting.name: setting.default for setting in listed}
        presets = {}
        for preset in PRESETS:
            values = as_plain(kind.from_preset(preset, {}))
            presets[preset] = {key: value for key, value in values.items() if value != defaults[key]}
        found.append(WorkloadInfo(name, kind.SUMMARY, listed, presets))
    return found


def as_plain(settings: Settings) -> dict[str, Any]:
    """Return every setting by name as text, number or bool, ready for JSON; ``configure`` reads this form."""
    plain = {}
    for setting in settings.listed():
        value = getattr(settings, setting.name)
        plain[setting.name] = getattr(value, "value", value)
    return plain


def configure(name: str, /, *, preset: str = "default", **values: Any) -> Settings:
    """Return the checked settings of a workload: a preset overridden by ``values``.

    Raises:
        WorkloadError: There is no such workload, preset or setting, or a value cannot be used.
    """
    if name not in _SETTINGS:
        raise WorkloadError(f"There is no workload {name!r}; choose one of {', '.join(_SETTINGS)}.")
    return _SETTINGS[name].from_preset(preset, values)


def parse(name: str, assignments: Iterable[str], *, preset: str = "default") -> Settings:
    """Return the checked settings of a workload from ``--set`` texts: ``parse("llama", ["batch=8", "dtype=bf16"])``.

    Raises:
        WorkloadError: As ``configure``, or a text is not ``key=value``.
    """
    return configure(name, preset=preset, **parse_assignments(assignments))


def create(settings: Settings) -> Workload:
    """Build the model and the optimizer of checked settings. Needs torch.

    Raises:
        WorkloadError: torch is absent, or the device does not exist.
    """
    try:
        workload = import_module("tracer.workloads.workload")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise WorkloadError("Running a workload needs torch, which is not installed; "
                            "install it with: pip install 'foretrace[capture]'") from error
    built: Workload = workload.create(settings)
    return built


def build(name: str, /, *, preset: str = "default", **values: Any) -> Workload:
    """Build a workload, as ``create(configure(...))``: ``build("llama", preset="tiny", batch=8)``. Needs torch.

    Raises:
        WorkloadError: As ``configure`` and ``create``.
    """
    return create(configure(name, preset=preset, **values))


def split(settings: Settings) -> Literal["fit", "held-out"]:
    """Return whether a configuration is used for fits or held out for tests; this is decided before any measurement.

    The rule: write the workload's name and its *size* settings as ``llama batch=4 depth=2 …`` (names sorted), and take
    the SHA-256 of that text. Hold the configuration out if its first eight bytes, read as a big-endian number, are a
    multiple of three. So a third of all sizes is held out, and every mode (dtype, optimizer, compile, checkpointing,
    device, seed …) of one size is on the same side. The order and number of configurations do not matter. A plan that
    needs other shares chooses other sizes, never another rule.
    """
    digest = hashlib.sha256(size_text(settings).encode()).digest()
    return "held-out" if int.from_bytes(digest[:8], "big") % HELD_OUT_ONE_IN == 0 else "fit"


def size_text(settings: Settings) -> str:
    """Return the workload and its sizes as one line, equal for all modes: ``lstm batch=4 depth=2 seq=64 …``."""
    sizes = (f"{name}={getattr(value, 'value', value)}" for name, value in settings.sizes().items())
    return " ".join([settings.WORKLOAD, *sizes])
