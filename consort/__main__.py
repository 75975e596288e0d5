"""`python -m consort` is the `consort` command."""

from cli.__main__ import main

if __name__ == "__main__":
    main()
