"""Two chained products over a machine: which axes are spatial, which temporal, what each level of memory carries."""
