"""Planaria: PyTorch jobs that regrow what they lose."""

__version__ = "0.1.0"
