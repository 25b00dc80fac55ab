"""Calibration: a device becomes known by measuring micro-benchmarks of its kernels for a few minutes.

    spaces ──candidates──▶ planner ──next item──▶ tracer.campaign worker (the only one with torch) ──times──┐
       ▲                      ▲─────────────────────────────────────────────────────────────────────────────┤
    device, limits         surrogate of log(time / formula)                      fitting ──▶ DeviceProfile ◀─┘
"""
