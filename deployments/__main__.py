"""`python -m deployments` is the `consort` command."""

from deployments.cli import main

main(prog_name="consort")
