"""The learner of a drafter that adapts online: a process of its own beside the replica."""
