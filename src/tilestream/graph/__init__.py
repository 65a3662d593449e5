"""What a model is: captured ATen graphs, what each operator means in tile ops, and which of them become regions."""
