"""A step: operands, the native plan, clipping, undo."""
