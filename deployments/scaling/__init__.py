"""The number of replicas of each model, by load or by hand."""
