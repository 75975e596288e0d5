"""Ensembles: the rounds of a request at its leader, and its rows at the members."""
