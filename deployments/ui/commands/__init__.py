"""What the commands of `consort` do, a file or two each; the command line itself is deployments/ui/cli.py."""
