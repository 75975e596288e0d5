"""The target loop: verifies drafts and commits tokens, leads ensembles, runs beam searches."""
