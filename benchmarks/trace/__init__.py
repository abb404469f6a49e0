"""Benchmarks of traces and of the replayer itself."""
