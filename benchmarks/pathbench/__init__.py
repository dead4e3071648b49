"""Parts of ``benchmarks/pathology.py``."""
