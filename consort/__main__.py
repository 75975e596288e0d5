"""`python -m consort` is the `consort` command."""

from deployments.ui.cli import main

if __name__ == "__main__":
    main(prog_name="consort")
