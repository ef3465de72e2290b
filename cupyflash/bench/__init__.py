"""Benchmarks: what is compared (`workloads`, `peers`) and how it is timed (`timing`)."""
