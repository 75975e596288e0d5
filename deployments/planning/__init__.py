"""Decides which devices, threads and lengths models get on this machine."""
