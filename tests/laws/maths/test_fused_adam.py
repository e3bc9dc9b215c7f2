"""Fused Adam against unfused. As a script, it also times both."""

from fused_vs_unfused import CONTIGUOUS, NON_CONTIGUOUS, check, main

from fusedstep import optim

OPTIONS = {"lr": 1e-2, "weight_decay": 0.01}


def test_contiguous_weights():
    check(optim.Adam, CONTIGUOUS, **OPTIONS)


def test_non_contiguous_weights():
    check(optim.Adam, NON_CONTIGUOUS, **OPTIONS)


if __name__ == "__main__":
    main("Adam", optim.Adam, **OPTIONS)
