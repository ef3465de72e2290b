"""The kernels of the GPU engines, compiled and run on the host: see README.md."""
