"""Frameworks whose own options select optimizers of this package, after ``register()``.

>>> from fusedstep import integrations
>>> integrations.timm.register()

A framework is imported by ``register()``, not before. A second call changes nothing, and
``unregister()`` undoes it. Lightning and Accelerate take any optimizer: they need no module.
"""

from fusedstep.integrations import deepspeed, megatron, timm, torchtitan, transformers

__all__ = ["deepspeed", "megatron", "timm", "torchtitan", "transformers"]
