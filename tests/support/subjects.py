"""Every class with each of its storages, built alike, and steps of it."""

import functools
from typing import Any, NamedTuple

import torch

from fusedstep import optim
from support.cases import CASES, PLAIN, first_of_each, parameters_of
from support.stepping import WAYS, as_parameters


class Subject(NamedTuple):
    """A class with options, and options of its group."""

    optimizer: type[torch.optim.Optimizer]
    options: dict[str, Any]
    of_group: dict[str, Any]
    dtype: torch.dtype = torch.float32

    def __str__(self):
        options = self.options | self.of_group
        words = [f"{name}={value}" for name, value in options.items()]
        return " ".join([self.optimizer.__name__, *words, str(self.dtype).removeprefix("torch.")])

    def build(self, params):
        return self.optimizer([{"params": params} | self.of_group], **self.options)


LOW_RANK = {"rank": 2, "update_proj_gap": 2}


IN_MUON = {"use_muon": True, "momentum": 0.9}


#: Options that choose other code, for the optimizers without a row.
OF_COMPOSITES = {
    optim.APOLLOAdamW: [
        LOW_RANK | more
        for more in ({}, {"proj": "svd"}, {"scale_type": "tensor"}, {"proj_type": "left"})
    ],
    optim.Adafactor: [
        {},
        {"variant": "transformers", "beta1": 0.9, "lr": 1e-3},
        {"variant": "transformers", "relative_step": True, "lr": None},
    ],
    optim.CAME: [{}],
    optim.GaLoreAdafactor: [LOW_RANK, LOW_RANK | {"svd": "randomized"}],
    optim.GaLoreAdamW: [
        LOW_RANK | {"svd": "randomized"},
        LOW_RANK | {"proj_type": "full"},
        *(LOW_RANK | {"svd": svd} for svd in ("power", "lazy")),
    ],
    optim.MuSGD: [IN_MUON, IN_MUON | {"nesterov": True}],
    optim.Muon: [{}, {"normalize": "neurons"}, {"cautious_decay": True}],
    optim.RowWiseAdagrad: [{}, {"initial_accumulator_value": 0.5}],
    optim.SparseAdam: [{}],
}


CODES = ("int8", "int4", "fp8")


def in_all_ways(optimizer, options, of_group):
    """A subject for each way that its steps are taken, and its states and weights are kept."""
    known = parameters_of(optimizer).keys()
    ways = [({}, torch.float32), *(({"state_dtype": kind}, torch.float32) for kind in CODES)]
    ways += [(way, torch.bfloat16) for way in WAYS.values()]
    for fused, some in (({"fused": None}, ways), ({"fused": False}, ways[:2] + ways[-1:])):
        for way, dtype in some:
            if (fused | way).keys() <= known:
                yield Subject(optimizer, options | fused | way, of_group, dtype)


def subjects():
    """Each class in all ways, and its other options with and without native kernels."""
    for case in CASES:
        ways = in_all_ways(case.optimizer, case.options | case.modes, {})
        yield from ways if case in PLAIN else [next(ways)]
    for optimizer, (first, *others) in OF_COMPOSITES.items():
        if optimizer is optim.SparseAdam:  # it has no other way
            yield Subject(optimizer, {}, first)
            continue
        yield from in_all_ways(optimizer, {}, first)
        for of_group in others:
            yield from (Subject(optimizer, {"fused": fused}, of_group) for fused in (None, False))


SUBJECTS = tuple(subjects())


#: Of each class the first, with native kernels and without.
FIRST = first_of_each(lambda each: (each.optimizer, each.options.get("fused")), SUBJECTS)


SHAPES = ((12, 8), (72, 64))


@functools.cache
def values(dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def built(subject, device):
    params = as_parameters([value.to(device) for value in values(subject.dtype, 0)])
    return params, subject.build(params)


def steps(subject, optimizer, params, numbers):
    for number in numbers:
        for param, value in zip(params, values(subject.dtype, number), strict=True):
            grad = value.to(param.device, copy=True)
            param.grad = grad.to_sparse(1) if subject.optimizer is optim.SparseAdam else grad
        optimizer.step()
