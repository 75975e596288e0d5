"""Models with their loops: one per process, or all of Consort in one process."""
