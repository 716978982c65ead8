"""What things cost: operators, memory, transfers and the pipeline's exact event order."""
