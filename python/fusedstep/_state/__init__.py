"""States of weights: which there are, how they are stored, and their checks."""
