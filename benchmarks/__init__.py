"""Measurements that anyone can run: `python -m benchmarks.NAME`."""
