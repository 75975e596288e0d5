"""The user interfaces: command line, console and web page."""
