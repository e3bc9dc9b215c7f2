"""Options that optimizers share: defaults and docstrings."""
