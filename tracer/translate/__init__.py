"""Recordings of other profilers as the events that PyTorch's own writes, so that one reader reads them all.

    nsys export --type sqlite report.nsys-rep     →  report.sqlite     (Nsight Systems)
    rocprofv3 --sys-trace --output-format json …  →  …_results.json    (ROCm)

Both know calls, kernels, copies and ranges that a program marked (NVTX, ROCTx), and nothing of shapes, except what
``torch.autograd.profiler.emit_nvtx(record_shapes=True)`` puts into its ranges' texts.
"""
