"""What people use: the command line, the console, the page."""
