"""The command ``python -m fusedstep.galore``: checks and times GaLore's step of one matrix.

The optimizer is :class:`fusedstep.optim.GaLoreAdamW`.
"""
