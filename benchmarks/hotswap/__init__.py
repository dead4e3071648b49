"""Parts of ``benchmarks/hot_swap.py``."""
