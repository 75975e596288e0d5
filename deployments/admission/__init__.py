"""Which requests are taken on, and when."""
