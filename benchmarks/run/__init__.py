"""What measures: kernels, models, compilations and first calls, on the machine that is there."""
