"""The native libraries and their operators."""
