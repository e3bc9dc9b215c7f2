"""Options of all groups together: the limit of the norm of gradients, and steps left out."""

from __future__ import annotations

import math

from fusedstep._options.kinds import check_number
from fusedstep._options.shared import own_option
from fusedstep._step.owner import Owner


def max_grad_norm(optimizer: Owner) -> float | None:
    """Returns the limit of the 2-norm of all gradients; clipping leaves ``.grad`` alone.

    None does not even take the norm.
    """
    given = [own_option(group, "max_grad_norm") for group in optimizer._groups]
    for norm in given:
        if norm is not None:
            check_number("max_grad_norm", norm)
    norms = {math.inf if norm is None else float(norm) for norm in given}
    if len(norms) > 1:
        raise ValueError(f"max_grad_norm must be the same in all groups, not {sorted(norms)}")
    norm = max(norms) if any(norm is not None for norm in given) else None
    return None if norm == optimizer._no_max_grad_norm else norm


def skips_nonfinite(optimizer: Owner) -> bool:
    """Returns whether steps are left out whose gradients have no finite norm."""
    given = {bool(own_option(group, "skip_nonfinite")) for group in optimizer._groups}
    if len(given) > 1:
        raise ValueError("skip_nonfinite must be the same in all groups")
    return True in given


def needs_whole_norm(optimizer: Owner) -> str | None:
    """Returns the name of an option that takes the norm of all gradients before a step."""
    if max_grad_norm(optimizer) is not None:
        return "max_grad_norm"
    return "skip_nonfinite" if skips_nonfinite(optimizer) else None
