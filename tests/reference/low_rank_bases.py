"""Bases of GaLore's references: from which side, and when they are new."""

import torch


def side_of(proj_type, rows, columns):
    if proj_type in ("left", "right", "full"):
        return proj_type
    keeps_rows = rows >= columns if proj_type == "std" else rows < columns
    return "right" if keeps_rows else "left"


def with_bases(state, g, step, rank, gap):
    """The state with the bases of a step: zeros of zeros, and then new ones at the first others."""
    if (step - 1) % gap and state["A"].any():
        return state
    u, _, vh = torch.linalg.svd(g, full_matrices=False)
    return state | {"A": u[:, :rank] * g.any(), "B": vh[:rank] * g.any()}
