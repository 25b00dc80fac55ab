"""The sequences of a step that a user wants, put into a plan."""

from __future__ import annotations

from dataclasses import replace

from tracer.parallel_plan import MOST_TASKS, ParallelPlan, PlanError


def says_batch(text: str) -> bool:
    """Return whether a plan's text says how many micro-batches a step has."""
    return "microbatches" in text or "accumulation" in text


def with_batch(plan: ParallelPlan, text: str, global_batch: int | None) -> ParallelPlan:
    """Return the plan with the micro-batches that a step of so many sequences has, where its text says none.

    Args:
        plan: as ``text`` says it.
        text: of the plan.
        global_batch: sequences of a step; ``None``: as many as the plan says.

    Raises:
        PlanError: the sequences cannot be spread over its replicas, or its text says another number of them.
    """
    if global_batch is None:
        return plan
    if says_batch(text):
        if plan.global_batch != global_batch:
            raise PlanError(f"The plan {text} has {plan.global_batch:,} sequences a step and not {global_batch:,}; "
                            "leave its microbatches or the batch out.")
        return plan
    passes, left = divmod(global_batch, plan.dp * plan.samples)
    if left or not passes:
        raise PlanError(f"A batch of {global_batch:,} sequences cannot be split evenly over dp={plan.dp} replicas with "
                        f"microbatch={plan.samples}; choose another batch.")
    if passes * plan.pp * plan.chunks > MOST_TASKS:
        raise PlanError(f"A batch of {global_batch:,} sequences is {passes:,} micro-batches on pp={plan.pp} stages, "
                        f"more than the {MOST_TASKS:,} pieces that are put in order; choose a smaller one.")
    return replace(plan, microbatches=passes)
