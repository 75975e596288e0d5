"""The HTTP application: routes, keys, admission, errors. Knows nothing of Ray."""
