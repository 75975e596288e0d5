"""Ensembles: a request's rounds with its members, and a member's side of them."""
