"""Independent references: one optimizer step in plain torch operations, in double precision.

Each function takes the weight, the gradient, the states after the step before (an empty dict at the
first step) and the number of the step (from 1), and returns the new weight and the new states. It
changes nothing in place. They are written from the papers and from torch's documentation, and know
nothing of the library.
"""
