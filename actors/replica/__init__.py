"""A model with its loop: in a process of its own, or all of Consort in one process."""
