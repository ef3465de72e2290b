"""The kernels of the engines simt and mma, compiled and run on the host: see README.md."""
