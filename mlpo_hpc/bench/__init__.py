"""Benchmarks: this library beside stock DeepSpeed, on the same storage at the same time."""
