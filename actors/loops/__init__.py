"""What all loops share: a thread, a mailbox, a table of rows, back-off when memory runs out."""
