"""Frameworks whose own options select optimizers of this package, after ``register()``.

>>> from fusedstep import integrations
>>> integrations.timm.register()

A framework is imported by ``register()``, not before. A second call changes nothing, and
``unregister()`` undoes it.
"""

from fusedstep.integrations import (
    accelerate,
    deepspeed,
    lightning,
    megatron,
    timm,
    torchtitan,
    transformers,
)

__all__ = [
    "accelerate",
    "deepspeed",
    "lightning",
    "megatron",
    "timm",
    "torchtitan",
    "transformers",
]
