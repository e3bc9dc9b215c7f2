"""Tells what a training run needs in memory: ``python -m fusedstep memory``."""
