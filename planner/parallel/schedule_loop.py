"""The inner loop of a pipeline's schedule."""

from __future__ import annotations

from tracer.machine_code import kept_loop


@kept_loop(*["int64[:,:]"] * 3, *["float64[:,:]"] * 3, "float64[:]", "int64", "float64[:,:,:,:]", "int64[:]",
           "float64[:]", *["float64[:,:]"] * 2)
def run_schedule(kind, microbatch, chunk, forward, backward, weights, transfer,  # type: ignore[no-untyped-def]
                 blocking, done, at, free, start, end):
    """The longest path, stage by stage as far as each can go: fills start and end and returns 1 if all was run.

    ``done``, -1 everywhere: when what a task hands on is there; ``at``, ``free``, 0: of each stage its next task, and
    when it is free.
    """
    stages, tasks = kind.shape
    chunks = forward.shape[1]
    left = stages * tasks
    moved = True
    while left > 0 and moved:
        moved = False
        for s in range(stages):
            while at[s] < tasks:
                t = at[s]
                k, m, c = kind[s, t], microbatch[s, t], chunk[s, t]
                ready = 0.0
                sends = True
                if k == 0:
                    sends = s < stages - 1 or c < chunks - 1
                    if s > 0:
                        ready = done[0, s - 1, c, m]
                        lag = transfer[s - 1]
                    elif c > 0:
                        ready = done[0, stages - 1, c - 1, m]
                        lag = transfer[stages - 1]
                    else:
                        lag = 0.0
                elif k == 1:
                    sends = s > 0 or c > 0
                    if s < stages - 1:
                        ready = done[1, s + 1, c, m]
                        lag = transfer[s]
                    elif c < chunks - 1:
                        ready = done[1, 0, c + 1, m]
                        lag = transfer[stages - 1]
                    else:
                        ready = done[0, s, c, m]
                        lag = 0.0
                else:
                    ready, lag, sends = done[1, s, c, m], 0.0, False
                if ready < 0.0:
                    break
                begin = max(free[s], ready + lag)
                finish = begin + (forward[s, c] if k == 0 else backward[s, c] if k == 1 else weights[s, c])
                start[s, t], end[s, t] = begin, finish
                if k < 2:
                    done[k, s, c, m] = finish
                free[s] = finish
                if blocking != 0 and sends:
                    free[s] += transfer[s] if k == 0 else transfer[(s - 1) % stages]
                at[s] += 1
                left -= 1
                moved = True
    return 1 if left == 0 else 0
