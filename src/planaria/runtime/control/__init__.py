"""How workers, launcher and command line talk to the coordinator."""
