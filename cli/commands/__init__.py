"""The commands of `consort`. The command line itself is cli/shell.py."""
