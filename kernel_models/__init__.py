"""What turns an operation into microseconds.

This release holds the launch constants that replay needs (``kernel_models.launch_constants``): launch latencies,
gaps between queued kernels, and return lags of blocking calls, each a few constants per trace.
"""
