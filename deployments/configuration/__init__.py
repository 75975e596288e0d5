"""The configuration of a server: its keys, how it is read, and how mistakes in it are reported."""
