"""Benchmarks of Consort and of comparable systems."""
