"""The rows of each optimizer in the case table, a module an optimizer."""
