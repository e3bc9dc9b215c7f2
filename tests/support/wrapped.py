"""What training scripts do to an optimizer that a framework has wrapped, beside plain steps."""

import torch

import fusedstep
from support.small import assert_same_losses, batches, loss_of, network

#: More steps than the 16 after which a repeated step looks at the states again.
REPEATS = 18


def replaced(optimizer):
    """Other tensors in place of the states."""
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim():
                state[name] = torch.full_like(value, 0.25)


def exchanged(optimizer):
    """Other memory in the same tensors."""
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor) and value.dim():
                value.data = torch.full_like(value, 0.25)


def cleared(optimizer):
    optimizer.state.clear()


EVENTS = (replaced, exchanged, cleared)


def assert_events_are_followed(wrap, kind):
    """As torch operations follow them without a wrapper.

    ``wrap(model, optimizer)`` returns what a framework makes of both. ``kind``: class, options.
    """
    cls, options = kind
    for event in EVENTS:
        found = _losses(wrap, kind, event)
        expected = _losses(_plain, (cls, options | {"fused": False}), event)
        assert_same_losses(found, expected, 2e-5)


def _plain(model, optimizer):
    return model, optimizer


def _losses(wrap, kind, event):
    cls, options = kind
    model = network()
    model, optimizer = wrap(model, cls(model.parameters(), **options))
    return _train(model, optimizer, event)


def _train(model, optimizer, event=None):
    losses = []
    for step, batch in enumerate(batches(2 * REPEATS + 4)):
        if event and step in (3, REPEATS + 4):
            event(optimizer)
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def assert_functions_take_it(wrap, kind):
    """offload, step_in_backward, verify; convert of what is inside."""
    expected = _losses(_plain, kind, None)
    cls, options = kind

    def offloaded(model, optimizer):
        model, optimizer = wrap(model, optimizer)
        return model, fusedstep.offload(optimizer)

    def in_backward(model, optimizer):
        model, optimizer = wrap(model, optimizer)
        fusedstep.step_in_backward(optimizer)
        return model, optimizer

    def converted(model, optimizer):
        model, optimizer = wrap(model, optimizer)
        return model, fusedstep.convert(getattr(optimizer, "optimizer", optimizer))

    for made in (offloaded, in_backward, converted):
        assert _losses(made, kind, None) == expected, made.__name__
    model = network()
    model, optimizer = wrap(model, cls(model.parameters(), **options))
    reports = []

    def verified(each):
        reports.append(fusedstep.verify(optimizer, steps=REPEATS))

    assert _train(model, optimizer, verified) == expected
    for report in reports:
        assert report.ok, report
