"""Gradients of weights and biases kept in registers while the batch streams past, alone or beside dX."""
