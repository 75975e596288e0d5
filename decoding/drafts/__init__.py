"""Drafts: the trie of proposals, proposers without a model, how long drafts should be, verification."""
