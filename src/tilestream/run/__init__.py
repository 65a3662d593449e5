"""What ``torch.compile`` calls: regions as calls of one operator, in a graph that Inductor compiles once."""
