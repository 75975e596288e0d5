"""Benchmarks: Consort beside its peers, in one interleaved run on the same machine."""
