"""Predictions held against measured runs: reading them, calibrating on a few, scoring the rest."""
