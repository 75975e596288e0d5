"""Strict pydantic models, and errors as HTTP reports them."""
