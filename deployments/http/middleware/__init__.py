"""ASGI middleware: what every request passes before its route. Knows no routes."""
