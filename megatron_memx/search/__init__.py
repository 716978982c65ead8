"""The search: which sizes, which split, what to recompute."""
