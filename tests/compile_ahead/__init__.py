"""Compiling, on a machine without a GPU, every kernel that tests/cuda would compile on one.

A stand-in takes CuPy's place, whose arrays are NumPy's and whose launches do nothing, and the tests
run on it: kernels land in a folder that a machine with a GPU then reads as its cache. All that is
validated, planned and launched runs, so that this is also a smoke test of that Python.
"""
