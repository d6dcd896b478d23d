"""Engines: one contract, `base`, and its implementations."""
