"""Attention over paged keys and values: one contract, an implementation per kind of device."""
