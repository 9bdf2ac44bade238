"""Code compiled by numba for the CPU; imported only where it runs."""
