"""Training that survives lost workers: see docs/design/runtime.md for the map."""
