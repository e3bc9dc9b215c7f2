"""The state of an optimizer that knows whether anybody has had it."""

from __future__ import annotations

from itertools import chain
from typing import Any

from torch import Tensor


class WatchedState:
    """Gives an optimizer its attribute ``state``.

    Whoever has had it may exchange what is in it, or move the memory of that, at any time: from
    then on every step looks. Code of the optimizer that lets nothing of it out goes by ``_state``.
    """

    @property
    def state(self) -> dict[Tensor, dict[str, Any]]:
        self._state_was_accessed = True
        return self._state

    @state.setter
    def state(self, state: dict[Tensor, dict[str, Any]]) -> None:
        # The first one comes from torch's constructor, which keeps it to itself.
        self._state_was_accessed = "_state" in self.__dict__
        self._state = state

    def state_dict(self) -> dict[str, Any]:
        was_accessed = self._state_was_accessed
        dictionary = super().state_dict()
        # Without states it lets nothing out, unless hooks have had the optimizer.
        hooks = self._optimizer_state_dict_pre_hooks, self._optimizer_state_dict_post_hooks
        if not (self._state or any(hooks)):
            self._state_was_accessed = was_accessed
        return dictionary

    def _accessed_states(self, weights: list[Tensor]) -> list[Tensor]:
        """The states of weights, if anybody has had them: autograd may have, too."""
        if not self._state_was_accessed:
            return []
        values = chain.from_iterable(self._state[p].values() for p in weights)
        return [value for value in values if isinstance(value, Tensor) and not value.is_inference()]
