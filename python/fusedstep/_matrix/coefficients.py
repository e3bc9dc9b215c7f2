"""Coefficients of Newton–Schulz iterations: a, b and c of each step."""

from __future__ import annotations

import math
from typing import Any

Step = tuple[float, float, float]

#: Keller Jordan's coefficients, for every step.
_QUINTIC: Step = (3.4445, -4.7750, 2.0315)

#: Amsel et al., The Polar Express, arXiv 2505.16932, algorithm 1: the best polynomial for each
#: step, for singular values of at least 1e-3. The last is that of all steps that follow.
_POLAR_EXPRESS: tuple[Step, ...] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)

#: The polynomials of Polar Express take singular values up to 1 to 1 and no further: rounding must
#: not make one larger. All steps but the last divide them by this first.
_SAFETY = 1.01

#: Sets of coefficients by name.
NAMES = ("quintic", "polar_express")


def coefficients_of(asked: Any, count: int) -> list[Step]:
    """The coefficients of so many steps.

    Args:
        asked: one of ``NAMES``, three numbers for all steps, or a tuple of three for each; the last
            is repeated
        count (int): how many steps there are

    Raises:
        ValueError: if it is none of these.
    """
    if isinstance(asked, str):
        if asked not in NAMES:
            raise ValueError(
                f"ns_coefficients must be one of {', '.join(map(repr, NAMES))}, three numbers, or "
                f"three numbers for each step, not {asked!r:.40}"
            )
        return [_QUINTIC] * count if asked == "quintic" else _polar_express(count)
    try:
        steps = [asked] if isinstance(asked[0], (int, float)) else asked
        numbers = [(float(a), float(b), float(c)) for a, b, c in steps]
        is_right = bool(numbers) and all(
            len(step) == 3 and all(map(math.isfinite, step)) for step in numbers
        )
    except (IndexError, KeyError, TypeError, ValueError):
        is_right = False
    if not is_right:
        raise ValueError(
            "ns_coefficients must be three numbers, three numbers for each step, or one of "
            f"{', '.join(map(repr, NAMES))}, not {asked!r:.60}"
        )
    return [numbers[min(index, len(numbers) - 1)] for index in range(count)]


def _polar_express(count: int) -> list[Step]:
    steps = [_POLAR_EXPRESS[min(index, len(_POLAR_EXPRESS) - 1)] for index in range(count)]
    return [(a / _SAFETY, b / _SAFETY**3, c / _SAFETY**5) for a, b, c in steps[:-1]] + steps[-1:]
