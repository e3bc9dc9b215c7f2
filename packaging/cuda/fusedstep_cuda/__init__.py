"""The CUDA kernels of fusedstep, which finds them here: nothing to import."""
