"""Benchmarks of single parts."""
