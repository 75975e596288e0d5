"""`python -m cli` is the `consort` command."""

import signal


def main() -> None:
    """Run the command. Ctrl-C ends it without a traceback, also while it is imported and after it has ended."""
    interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if interruptible:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from cli import shell

    if interruptible:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        shell.main(prog_name="consort")
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


if __name__ == "__main__":
    main()
