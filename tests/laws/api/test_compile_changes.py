"""Law: the graph of a compiled step holds as numbers change, and is made anew where it must be."""

import copy

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR

from support.cases import FAMILIES
from support.compiled import (
    BACKEND,
    GRAPHS,
    OPERATORS,
    STEPS,
    WITH_AMSGRAD,
    WITH_BETAS,
    Twins,
    graphs,
    params_of,
)

pytestmark = pytest.mark.usefixtures("compiler_reset")


class TestOptionsWithoutRecompiling:
    """Each option of a number may change: the graph reads it when it runs."""

    @pytest.mark.parametrize("case", GRAPHS, ids=str)
    def test_lr_as_a_tensor(self, case):
        twins = Twins(case, lr=torch.tensor(0.1))
        for number in STEPS:
            for optimizer in twins.both:
                optimizer.param_groups[0]["lr"].fill_(0.01 / number)
            twins.take_step(number)
        assert graphs() == 1

    def test_lr_of_another_kind(self):
        twins = Twins(OPERATORS[0])
        kinds = [0.1, torch.tensor(0.2), torch.tensor([0.3], dtype=torch.float64), 1]
        for number, lr in enumerate(kinds):
            for optimizer in twins.both:
                optimizer.param_groups[0]["lr"] = lr
            twins.take_step(number)
        assert graphs() == 1

    @pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)], ids=["float", "tensor"])
    @pytest.mark.parametrize(
        "schedule",
        [lambda o: CosineAnnealingLR(o, 5), lambda o: OneCycleLR(o, 0.1, total_steps=9)],
        ids=["cosine", "lr and momentum"],
    )
    def test_a_scheduler(self, schedule, lr):
        twins = Twins(WITH_BETAS, lr=lr)
        schedulers = [schedule(optimizer) for optimizer in twins.both]
        # A scheduler wraps the step, and its wrapper is nothing that torch compiles.
        twins.step = torch.compile(twins.compiled.step, backend=BACKEND)
        for number in STEPS:
            twins.take_step(number)
            for scheduler in schedulers:
                scheduler.step()
        assert graphs() == 1

    @pytest.mark.parametrize("case", OPERATORS, ids=str)
    def test_every_number(self, case):
        twins = Twins(case)
        group = twins.plain.param_groups[0]
        for number in STEPS:
            changed = {
                name: value / 2 + 0.01
                for name, value in group.items()
                # A step that clips is in no graph: see test_a_clip_of_the_optimizers_own.
                # Without momentum there is no state for it: that makes another graph.
                if isinstance(value, float) and name not in ("max_grad_norm", "momentum")
            }
            if "betas" in group:
                changed["betas"] = tuple(beta - 0.01 for beta in group["betas"])
            for optimizer in twins.both:
                optimizer.param_groups[0] |= changed | {"maximize": not group["maximize"]}
            twins.take_step(number)
        assert graphs() == 1

    def test_by_compiled_code(self):
        """The graph has the old options until it has run, so the step comes after it."""
        twins = Twins(OPERATORS[0])

        def train(optimizer, factor):
            optimizer.param_groups[0]["lr"] *= factor
            optimizer.step()

        compiled = torch.compile(train, backend=BACKEND)
        for number in STEPS:
            twins.set_grads(number)
            compiled(twins.compiled, 0.5)
            train(twins.plain, 0.5)
            twins.check()

    def test_by_a_hook(self):
        twins = Twins(OPERATORS[0], fullgraph=False)
        for optimizer in twins.both:
            optimizer.register_step_pre_hook(halve_lr)
        for number in STEPS:
            twins.take_step(number)

    def test_a_tensor_written_in_the_graph(self):
        twins = Twins(OPERATORS[0], lr=torch.tensor(0.1))

        def train(optimizer):
            optimizer.param_groups[0]["lr"].mul_(0.5)
            optimizer.step()

        compiled = torch.compile(train, backend=BACKEND, fullgraph=True)
        for number in STEPS:
            twins.set_grads(number)
            compiled(twins.compiled)
            train(twins.plain)
            twins.check()
        assert graphs() == 1


def halve_lr(optimizer, args, kwargs):
    optimizer.param_groups[0]["lr"] *= 0.5


class TestRecompiling:
    """Changes that a graph is made anew for."""

    def test_gradients_that_come_and_go(self):
        twins = Twins(OPERATORS[0])
        all_of_them = (0, 1, 2, 3)
        for number, absent in enumerate([(1, 2), (2,), all_of_them, (), (1, 2)]):
            twins.take_step(number, absent)
            assert len(twins.compiled.state) == len(twins.plain.state)
        made = graphs()
        for number, absent in enumerate([(1, 2), (), all_of_them, (1, 2)]):
            twins.take_step(number, absent)
        assert graphs() == made

    @pytest.mark.parametrize("case", FAMILIES, ids=str)
    def test_groups_and_weights_added_later(self, case):
        twins = Twins(case)
        twins.take_step(1)
        twins.add(torch.ones(5), lr=0.5)
        twins.take_step(2)
        twins.add(torch.ones(6))
        twins.take_step(3)
        twins.take_step(4)
        assert graphs() == 3

    def test_amsgrad_switched_on(self):
        twins = Twins(WITH_AMSGRAD)
        for number in STEPS:
            for optimizer in twins.both:
                optimizer.param_groups[0]["amsgrad"] = number > 2
            twins.take_step(number)
        assert "max_exp_avg_sq" in twins.compiled.state[params_of(twins.compiled)[0]]
        assert graphs() == 2

    def test_states_that_go(self):
        twins = Twins(OPERATORS[0])
        for number in STEPS:
            twins.take_step(number)
            if number == 2:
                for optimizer in twins.both:
                    optimizer.state.clear()

    def test_another_optimizer(self):
        """Two of a class through one function: each reads its own options."""
        step = torch.compile(lambda optimizer: optimizer.step(), backend=BACKEND, fullgraph=True)
        pairs = [Twins(OPERATORS[0], lr=lr) for lr in (0.1, 0.2)]
        for number in STEPS:
            for twins in pairs:
                twins.set_grads(number)
                step(twins.compiled)
                twins.plain.step()
                twins.check()

    def test_a_copy(self):
        twins = Twins(OPERATORS[0])
        twins.take_step(1)
        twins.compiled = copy.deepcopy(twins.compiled)
        twins.both = (twins.compiled, twins.plain)
        twins.step = torch.compile(twins.compiled.step, backend=BACKEND, fullgraph=True)
        for optimizer in twins.both:
            optimizer.param_groups[0]["lr"] = 0.5
        twins.take_step(2)
