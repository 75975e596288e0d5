"""Finetuning of any model on chats or texts that a user brings. Must not know how models are served."""
