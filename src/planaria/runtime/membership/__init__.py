"""The pure decisions: who is in the run, who owns what, how it goes on."""
