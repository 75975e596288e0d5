"""The drafter: runs ahead of the verdicts and offers drafts."""
