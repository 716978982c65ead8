"""What people see: the plan, its reasons, and the prediction beside the measurement."""
