"""Online adaptation: a drafter that learns from committed texts while it serves."""
