"""Synthetic tissue with ground truth, for tests, demonstrations and ablations; never for more.

It looks like H&E to a network and to nobody else. Whatever is made from it says "synthetic".
"""
