"""Benchmarks of the ops, and what can be known of their kernels without a GPU."""
