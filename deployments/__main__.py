"""`python -m deployments` is the `consort` command."""

from deployments.ui.cli import main

main(prog_name="consort")
