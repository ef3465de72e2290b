"""Benchmarks: what is compared (`workloads`, `peers`), how (`runner`, `timing`), what comes out."""
