"""The coordinator: dispatches requests to replicas and streams their text."""
