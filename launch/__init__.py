"""Start processes: memx-torchrun, the step before it and the entry of every rank."""
