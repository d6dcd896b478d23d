"""Models of `transformers`: so far the oracle of parity tests."""
