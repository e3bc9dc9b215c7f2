"""A step in torch operations: the fallback of native kernels."""
