"""Makes a drafter for any target, from nothing but the target. Must not know the command line."""
