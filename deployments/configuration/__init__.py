"""What a server's configuration may say, and how it is read and refused."""
