"""Triton kernels behind an import guard: every one has a torch form with the same result."""
