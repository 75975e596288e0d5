"""The target: drafts, verifies, commits; plans draft lengths; leads ensembles; searches with beams."""
