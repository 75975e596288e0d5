"""Answers chosen among whole candidates: what members propose is scored, voted on or compared."""
