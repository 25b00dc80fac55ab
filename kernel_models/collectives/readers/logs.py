"""``read_log``: measured collectives of any log or table that is known."""

from __future__ import annotations

from pathlib import Path

from kernel_models.collectives.call import CommError
from kernel_models.collectives.measurements import CollectiveMeasurements
from kernel_models.collectives.readers.hints import Hints
from kernel_models.collectives.readers.inspector import inspector_folder, is_inspector, read_inspector
from kernel_models.collectives.readers.mpi import is_mpi, read_mpi
from kernel_models.collectives.readers.nccl_tests import is_nccl_tests, read_nccl_tests
from kernel_models.collectives.readers.param import is_param, read_param
from kernel_models.collectives.readers.tables import is_table, read_table
from tracer.input_file import read_input

MOST_BYTES = 256 << 20


def read_log(path: str, hints: Hints | None = None) -> CollectiveMeasurements:
    """Read a log or table of measurements, whichever it is.

    Raises:
        CommError: It is none that is known, or a line of it is broken; one sentence, with the line.
        OSError: It cannot be read.
    """
    hints = hints or Hints()
    if logs := inspector_folder(Path(path)):
        return read_inspector(logs, hints)
    if is_table(path):
        return read_table(path, hints)
    file = Path(path)
    if file.stat().st_size > MOST_BYTES:
        raise CommError(f"{file.name} is larger than {MOST_BYTES >> 20} MiB; give the log of the benchmark alone.")
    text = read_input(file).decode("utf-8", "replace")
    if is_inspector(text):
        return read_inspector([file], hints)
    if is_param(text):
        return read_param(text, file.name, hints)
    if is_mpi(text):
        return read_mpi(text, file.name, hints)
    if is_nccl_tests(text):
        return read_nccl_tests(text, file.name, hints)
    raise CommError(f"{file.name} is no output of nccl-tests, rccl-tests, PARAM, NCCL's inspector, OSU's benchmarks or "
                    "ucc_perftest, and no table (.csv, .tsv, .jsonl, .parquet); give one of those or a trace.")
