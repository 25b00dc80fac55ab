"""``log``: figures of a prediction or a gate where a training run logs: Weights & Biases, TensorBoard, a function."""

from __future__ import annotations

from typing import Any

from graph_predictor.exports.scalars import scalars_of
from tracer.errors import ForetraceError


def log(result: object, run: Any, step: int | None = None, prefix: str = "foretrace") -> dict[str, float]:
    """Log a result's figures, each under ``prefix/``.

        foretrace.log(foretrace.predict(job), wandb.run)
        foretrace.log(prediction, SummaryWriter("runs/a"), step=100)

    Args:
        result: a prediction, a replay, a breakdown, or the outcome of a check.
        run: what logs: a Weights & Biases run (or another with ``log(figures, step=…)``), a ``SummaryWriter``
            (``add_scalar``), or a function that takes the figures by name.
        step: of the run's axis; by default its own.
        prefix: put before each name; empty for none.

    Returns:
        The figures that were logged, by name.

    Raises:
        ForetraceError: the result has no figures, or ``run`` can log none.
    """
    figures = {f"{prefix}/{name}" if prefix else name: value for name, value in scalars_of(result).items()}
    if callable(getattr(run, "add_scalar", None)):
        for name, value in figures.items():
            run.add_scalar(name, value, step)
    elif callable(getattr(run, "log", None)):
        run.log(figures, step=step) if step is not None else run.log(figures)
    elif callable(run):
        run(figures)
    else:
        raise ForetraceError(f"{type(run).__name__} logs nothing that is known: give a Weights & Biases run, a "
                             "SummaryWriter, or a function that takes the figures.")
    return figures
