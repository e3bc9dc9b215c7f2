"""Takes over states and options that were made elsewhere: saved, copied or unpickled."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch.optim import Optimizer

from fusedstep._api.registry import register
from fusedstep._api.saved import (
    check_dictionary,
    check_is_no_checkpoint,
    own_of,
    with_options_of_empty_groups,
)
from fusedstep._native import ops
from fusedstep._options.kinds import make_plain
from fusedstep._options.shared import fill_own
from fusedstep._step.binding import BindsGroups


class LoadsStates(BindsGroups):
    """Gives an optimizer ``load_state_dict`` and ``__setstate__``: they take all, or nothing."""

    @torch._disable_dynamo
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the optimizer state, as torch does, but for float32 states of 16-bit weights.

        They stay float32. torch casts them to the weight's dtype. Nothing has changed after an
        error. Another thread must not step meanwhile: who comes second gets an error.
        """
        if (inner := self._wrapped()) is not None:
            inner.load_state_dict(state_dict)
            shared = vars(self).keys() & vars(inner).keys()  # of wrappers that have copied them
            vars(self).update({name: vars(inner)[name] for name in shared})
            return
        if "_stepping" in vars(self):
            raise RuntimeError(ops.IS_STEPPED)
        for plan in (*self._plans.values(), *self._aside):
            ops.check_idle(plan.handle)
        # The last hook sees the dictionary as the user's hooks have left it, before torch casts it.
        self._loading: dict[str, Any] = {}

        def look(_: Optimizer, dictionary: dict[str, Any]) -> dict[str, Any]:
            dictionary = own_of(dictionary)
            check_is_no_checkpoint(dictionary)
            dictionary = self._in_own_form(dictionary)
            dictionary = with_options_of_empty_groups(self, dictionary)
            check_dictionary(self, dictionary)
            self._loading.update(dictionary)
            return dictionary

        hook = self.register_load_state_dict_pre_hook(look)
        try:
            super().load_state_dict(state_dict)
        except RuntimeError as error:
            ops.raise_memory_error(error)
            raise
        finally:
            hook.remove()
            del self._loading
        # torch has made the dictionary of states: without any, nobody but a hook can have it.
        if not (self._state or self._optimizer_load_state_dict_post_hooks):
            self._store.was_read = False

    def _wrapped(self) -> LoadsStates | None:
        """The optimizer inside of a wrapper that took its class; None if this is no such wrapper.

        torch's method would load into the wrapper alone, whose states nobody steps.
        """
        store = getattr(self, "_store", None)
        inside = [value for value in vars(self).values() if isinstance(value, LoadsStates)]
        return next((each for each in inside if each._store is store), None)

    def _in_own_words(self, group: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
        """The options of a dictionary's group by this class's names; ``own``: those it replaces."""
        return group

    def _in_own_form(self, dictionary: dict[str, Any]) -> dict[str, Any]:
        """A dictionary by this class's names, without states that no step reads."""
        if not dictionary.keys() >= {"param_groups", "state"}:
            return dictionary  # torch has an error for that
        groups = [self._in_own_words(group, {}) for group in dictionary["param_groups"]]
        states = {
            key: {name: value for name, value in state.items() if name not in self._unread_states}
            if isinstance(state, dict)
            else state
            for key, state in dictionary["state"].items()
        }
        return {**dictionary, "param_groups": groups, "state": states}

    def __setstate__(self, state: dict[str, Any]) -> None:
        before = {k: v for k, v in vars(self).items() if k in ("_state", "_store", "_groups")}
        try:
            self._take_over(state)
        except BaseException:  # memory that ran out, for one
            vars(self).update(before)
            self._forget_plans()
            raise

    @torch.inference_mode(False)  # as where a step makes states
    def _take_over(self, state: dict[str, Any]) -> None:
        is_loading = "_loading" in vars(self)
        names = [set(group) for group in vars(self).get("_groups", ())]
        super().__setstate__(state)
        if "param_groups" in self.__dict__:
            self.param_groups = self.__dict__.pop("param_groups")
        if "state" in self.__dict__:
            self.state = self.__dict__.pop("state")
            self._store.note_read()
        if "_name" not in self.__dict__:
            self._name = register(self)
        self._forget_plans()
        loading = self._loading if is_loading else {"param_groups": (), "state": {}}
        keys = chain.from_iterable(group["params"] for group in loading["param_groups"])
        for index, group in enumerate(self.param_groups):
            for name, value in self._later_options.items():
                group.setdefault(name, value)
            kept = names[index] if index < len(names) else group
            fill_own(group, self.defaults, self._own_options, kept)
            make_plain(self._option_kinds, group)
            for p, key in zip(group["params"], keys, strict=False):
                self._store.keep_wide(group, p, loading["state"].get(key, {}))
            self._store.make_ordinary(group["params"])
            self._store.tidy(group)
            weights = [p for p in group["params"] if self._state.get(p)]
            for p in weights:
                self._store.convert(group, p)
            self._store.create_later(group, weights, self._groups)
            if self._wants_native(group) and not self._why_not_native(weights):
                self._store.place(group, weights, from_dictionary=is_loading)
