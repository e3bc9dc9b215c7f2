"""Fused Adagrad against unfused. As a script, it also times both."""

from fused_vs_unfused import CONTIGUOUS, NON_CONTIGUOUS, check, main

from fusedstep import optim

OPTIONS = {"lr": 1e-2, "lr_decay": 0.01}


def test_contiguous_weights():
    check(optim.Adagrad, CONTIGUOUS, **OPTIONS)


def test_non_contiguous_weights():
    check(optim.Adagrad, NON_CONTIGUOUS, **OPTIONS)


if __name__ == "__main__":
    main("Adagrad", optim.Adagrad, **OPTIONS)
