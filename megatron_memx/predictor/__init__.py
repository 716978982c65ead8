"""Unit costs from measurements: a physical core and a learned residual."""
