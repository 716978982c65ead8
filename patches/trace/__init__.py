"""The memory oracle: the real Megatron stage under fake tensors, its live bytes counted."""
