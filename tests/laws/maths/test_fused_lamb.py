"""Fused LAMB against unfused. As a script, it also times both."""

import torch
from fused_vs_unfused import CONTIGUOUS, NON_CONTIGUOUS, check, main

from fusedstep import optim

OPTIONS = {"lr": 1e-2, "weight_decay": 0.01}


def test_contiguous_weights():
    check(optim.Lamb, CONTIGUOUS, **OPTIONS)


def test_non_contiguous_weights():
    check(optim.Lamb, NON_CONTIGUOUS, **OPTIONS)


def test_a_large_weight_whose_elements_lie_apart():
    """Also in torch operations, whose own norm of it is a thousandth off on one thread."""
    torch.manual_seed(0)
    values, grad = torch.randn(2048, 2048), torch.randn(2048, 1024)

    def change(fused: bool, weight: torch.Tensor) -> torch.Tensor:
        param = torch.nn.Parameter(weight)
        param.grad = grad.to(weight.dtype, copy=True)
        before = param.detach().clone().double()
        optim.Lamb([param], fused=fused, **OPTIONS).step()
        return param.detach().double() - before

    torch.set_num_threads(1)
    expected = change(False, values[:, ::2].double()).norm()
    for fused in (True, False):
        changed = change(fused, values.clone()[:, ::2]).norm()
        assert abs(changed / expected - 1) < 1e-4, fused


if __name__ == "__main__":
    main("LAMB", optim.Lamb, **OPTIONS)
