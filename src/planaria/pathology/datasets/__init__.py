"""Data sets of the user's own: what they must hold, what was found, and how they are split.

None is shipped or downloaded. Each has a contract (columns, counts, licence) and is validated
explicitly: reading never repairs anything in silence.
"""
