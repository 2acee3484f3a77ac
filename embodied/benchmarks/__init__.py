"""Benchmarks of ``python -m embodied.bench``, one per module."""
