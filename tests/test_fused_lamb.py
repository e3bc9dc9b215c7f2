"""Fused LAMB against unfused. As a script, it also times both."""

from fused_vs_unfused import CONTIGUOUS, NON_CONTIGUOUS, check, main
from fusedstep import optim

OPTIONS = {"lr": 1e-2, "weight_decay": 0.01}


def test_contiguous_weights():
    check(optim.Lamb, CONTIGUOUS, **OPTIONS)


def test_non_contiguous_weights():
    check(optim.Lamb, NON_CONTIGUOUS, **OPTIONS)


if __name__ == "__main__":
    main("LAMB", optim.Lamb, **OPTIONS)
