"""Texts, speeds and drafts: measured, compared, reported."""
