"""The commands of `consort`. The command line itself is deployments/ui/cli.py."""
