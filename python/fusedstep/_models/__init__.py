"""Optimizers of a model: the roles of its weights, groups, presets."""
