"""What a pipeline becomes on a GPU: families of kernels, each a mainloop and the rule which pipelines it takes."""
