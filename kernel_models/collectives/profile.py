"""``CommProfile``: the known times of one cluster's collectives, by backend, and their file.

The best known level answers: a measured curve, a measured neighbour, the fitted α–β model, the data sheet. The file is
plain JSON, written whole or not at all.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from kernel_models.collectives.call import (
    BARRIER_BYTES,
    DTYPES,
    CollectiveBatch,
    CollectiveKind,
    CommError,
    CommTimes,
    Level,
    Placement,
)
from kernel_models.collectives.datasheet import DatasheetModel, interval_checked
from kernel_models.collectives.fitted import FittedModel
from kernel_models.collectives.measured import MeasuredModel
from kernel_models.collectives.measurements import CollectiveMeasurements, of_cluster
from kernel_models.collectives.topology import Topology, topology_of_state, topology_state
from tracer.arrays import Bool
from tracer.input_file import DecodeError, convert, from_json, read_input
from tracer.output_file import replaced_file, why_unwritten

FORMAT = "foretrace-comm"
VERSION = 1  # version of the format; raise it when an older reader would misread a new file
DEFAULT_BACKEND = "nccl"


class _Models(msgspec.Struct):
    measured: dict[str, Any]
    fitted: dict[str, Any]


class _State(msgspec.Struct):
    """The stored form of a ``CommProfile``, as ``state()`` returns it."""

    topology: str | dict[str, Any]
    oversubscription: float
    sources: list[str]
    backends: dict[str, _Models]


@dataclass
class BackendModels:
    """One backend's models: curves through its measurements, and formulas fitted to them."""

    measured: MeasuredModel
    fitted: FittedModel


@dataclass
class CommProfile:
    """The collectives of a cluster.

    Attributes:
        topology: node type, count and network.
        backends: models by name, such as "nccl" or "gloo"; empty for data sheet figures only.
        sources: sources of the measurements, one line each.
    """

    topology: Topology
    backends: dict[str, BackendModels] = field(default_factory=dict)
    sources: list[str] = field(default_factory=list)

    @staticmethod
    def fit(measurements: CollectiveMeasurements, on: Topology, sources: list[str] | None = None) -> CommProfile:
        """Fit all levels of all backends that were measured.

        Raises:
            CommError: The measurements are of several GPUs or systems, or none is of the topology's GPU.
        """
        measurements = of_cluster(measurements, on)[0].of_one_machine()
        shared = on.node.link == "pcie"
        backends = {}
        for name in measurements.backends():
            rows = measurements.of_backend(name).aggregated()
            backends[name] = BackendModels(MeasuredModel.fit(rows, shared_link=shared), FittedModel.fit(rows, on))
        return CommProfile(on, backends, list(sources or []))

    def backend_names(self) -> list[str]:
        """Return the names of the measured backends, sorted."""
        return sorted(self.backends)

    def predict(self, batch: CollectiveBatch, backend: str | None = None, *, on: Topology | None = None) -> CommTimes:
        """Return the times of a batch of collectives, each from the best level that knows it.

        Args:
            batch: The collectives.
            backend: Name of the backend; default: NCCL if measured, else the first; formulas if none was measured.
            on: Another number of the same nodes, or another network; default: the profile's topology.

        Raises:
            CommError: That backend was not measured.
        """
        if backend is None:
            names = self.backend_names()
            backend = DEFAULT_BACKEND if DEFAULT_BACKEND in names else (names[0] if names else None)
        elif backend not in self.backends:
            raise CommError(f"The profile knows nothing of {backend!r}; it has "
                            f"{', '.join(self.backend_names()) or 'no measured backend'}.")
        batch = _barriers_as_all_reduce(batch)
        formulas = DatasheetModel(on or self.topology)
        if backend is None:
            out = formulas.predict(batch)
        else:
            models = self.backends[backend]
            out = models.measured.predict(batch)
            below = np.zeros(len(batch), np.bool_)
            for level in (models.fitted.predict, formulas.predict):
                rest = out.level == int(Level.UNKNOWN)
                if rest.any():
                    out.put(rest, level(batch.take(rest)))
                    below |= rest
            _keep_below_measured(out, batch, below, models.measured)
        nothing = (batch.ranks <= 1) | (batch.payload_bytes <= 0)
        if nothing.any():
            for name in ("time_us", "low_us", "high_us"):
                getattr(out, name)[nothing] = 0.0
            out.level[nothing], out.algorithm[nothing] = int(Level.NOTHING_TO_DO), -1
        return out

    def interval_checked(self, kind: CollectiveKind, placement: Placement, level: Level, backend: str | None = None, *,
                         on: Topology | None = None) -> bool:
        """Return whether measurements support an answer's 80% interval; else it is assumed.

        Measured levels were checked by leaving measurements out, the fitted level for measured groups, data sheets on
        the tables of ``datasheet.INTERVALS``.
        """
        if level is Level.DATASHEET:
            return interval_checked(on or self.topology, kind, placement.nodes)
        if level is Level.FITTED:
            group = (placement.ranks, placement.nodes, placement.widest, placement.narrowest)
            names = [backend] if backend else list(self.backends)
            return any(key[0] == kind and key[2:] == group for name in names
                       for key in self.backends[name].fitted.pieces)
        return level is not Level.UNKNOWN

    def measured_dtypes(self, kind: CollectiveKind, backend: str | None = None) -> list[str]:
        """Return the dtypes in which a collective was measured, sorted."""
        names = [backend] if backend else list(self.backends)
        return sorted({DTYPES[key[1]] for name in names if name in self.backends
                       for key in self.backends[name].fitted.pieces if key[0] == kind})

    def state(self) -> dict[str, Any]:
        """Return plain JSON values, for this profile's own file or as a part of another."""
        return {"topology": topology_state(self.topology), "oversubscription": self.topology.network.oversubscription,
                "sources": self.sources,
                "backends": {name: {"measured": models.measured.state(), "fitted": models.fitted.state()}
                             for name, models in self.backends.items()}}

    @staticmethod
    def from_state(state: dict[str, Any]) -> CommProfile:
        """Return the profile that ``state()`` stored. Raises ``CommError`` for other values."""
        try:
            stored = convert(state, _State)
        except DecodeError as error:
            raise CommError(f"it is not complete: {error}") from None
        backends = {name: BackendModels(MeasuredModel.from_state(models.measured),
                                        FittedModel.from_state(models.fitted))
                    for name, models in stored.backends.items()}
        return CommProfile(topology_of_state(stored.topology, stored.oversubscription), backends, stored.sources)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file, whole or not at all. Raises ``CommError`` naming the file where it cannot be written."""
        try:
            self._write(Path(path))
        except OSError as error:
            raise CommError(why_unwritten(path, error)) from None

    def _write(self, target: Path) -> None:
        state = {"format": FORMAT, "version": VERSION, **self.state()}
        with replaced_file(target) as file:
            file.write(json.dumps(state, allow_nan=False).encode() + b"\n")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> CommProfile:
        """Read a file that ``save`` wrote. Raises ``CommError`` if it is corrupt, newer or of another kind."""
        name = os.fspath(path)
        try:
            state: Any = from_json(read_input(path))
        except OSError as error:
            raise CommError(f"{name} cannot be read: {error.strerror}; name a file of 'foretrace comm fit'.") from None
        except DecodeError:
            raise CommError(f"{name} is no profile of collectives, or was cut off; make it again with "
                            "'foretrace comm fit'.") from None
        if not isinstance(state, dict) or state.get("format") != FORMAT:
            raise CommError(f"{name} is no profile of collectives; name a file of 'foretrace comm fit'.")
        if not isinstance(state.get("version"), int) or state["version"] > VERSION:
            raise CommError(f"{name} is of a newer foretrace (version {state.get('version')} of the file, {VERSION} is "
                            "known here); update foretrace, or fit the logs again.")
        try:
            return CommProfile.from_state(state)
        except CommError as error:
            raise CommError(f"{name} is a damaged profile of collectives ({error}); make it again with "
                            "'foretrace comm fit'.") from None


def _keep_below_measured(out: CommTimes, batch: CollectiveBatch, rows: Bool,
                         measured: MeasuredModel) -> None:
    """Scale times below a measured curve's start so that the other level's time at the start is not above the curve."""
    index = np.flatnonzero(rows)
    if not len(index):
        return
    begin = measured.begins(batch.take(index))
    index, begin = index[np.isfinite(begin)], begin[np.isfinite(begin)]
    if not len(index):
        return
    edge = batch.take(index)
    edge.payload_bytes = begin
    factor = np.minimum(measured.predict(edge).time_us / np.maximum(out.time_us[index], 1e-12), 1.0)
    for name in ("time_us", "low_us", "high_us"):
        getattr(out, name)[index] *= factor


def _barriers_as_all_reduce(batch: CollectiveBatch) -> CollectiveBatch:
    barrier = batch.kind == int(CollectiveKind.BARRIER)
    if not barrier.any():
        return batch
    return CollectiveBatch(np.where(barrier, int(CollectiveKind.ALL_REDUCE), batch.kind),
                           np.where(barrier, BARRIER_BYTES, batch.payload_bytes), batch.dtype, batch.ranks, batch.nodes,
                           batch.widest, batch.narrowest)
