"""What runs in the replicas of Serve's deployments: models, the coordinator with HTTP, the ledger of limits."""
