"""Newton–Schulz in float64: polynomials of the singular values in place of products of matrices.

Matrices may be stacks of them, of the last two dimensions.
"""

import torch
from torch.linalg import matrix_norm


def almost_orthogonal(matrix):
    """The rows of a wide matrix, or the columns of a tall one, as the AOL start scales them."""
    if matrix.shape[-2] > matrix.shape[-1]:
        return almost_orthogonal(matrix.mT).mT
    sums = (matrix @ matrix.mT).abs().sum(-1, keepdim=True)
    return matrix / sums.clamp(min=2**-20 / matrix.shape[-2]).sqrt()


def iterated(matrix, coefficients, eps, start="norm"):
    """The matrix whose singular values are those of the given one after all steps."""
    if start == "aol":
        norm = matrix_norm(matrix, keepdim=True).clamp(min=eps)
        u, s, v = torch.linalg.svd(almost_orthogonal(matrix / norm), full_matrices=False)
    else:
        u, s, v = torch.linalg.svd(matrix, full_matrices=False)
        s = s / s.square().sum(-1, keepdim=True).sqrt().clamp(min=eps)
    for a, b, c in coefficients:
        s = a * s + b * s**3 + c * s**5
    return u * s[..., None, :] @ v
