"""Fields of requests, and of the configuration where it has the same: strict models, and what all APIs share."""
