"""Drafts, the trie that collects them, proposers without a model, draft lengths, verification."""
