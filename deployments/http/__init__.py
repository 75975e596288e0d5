"""The HTTP application: routes, keys, admission, errors."""
