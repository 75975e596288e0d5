"""What Consort does on one GPU."""
