"""The drafter: drafts ahead of the target's verdicts."""
