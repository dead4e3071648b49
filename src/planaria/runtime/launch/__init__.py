"""Starting a run: launcher, warm workers, their logs and their end."""
