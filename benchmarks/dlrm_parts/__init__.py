"""Parts of the benchmarks of recommendation models."""
