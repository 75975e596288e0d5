"""Parts that all loops share: thread, mailbox, table of rows, grammar jobs, out-of-memory backoff."""
