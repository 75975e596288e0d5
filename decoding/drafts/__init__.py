"""Drafts: the trie of proposals, proposers without a model, draft lengths, verification."""
