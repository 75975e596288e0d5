"""Low-rank adapters beside a model's layers, a different one for each token."""
