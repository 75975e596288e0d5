"""Admission control: which requests are accepted, and when they begin."""
