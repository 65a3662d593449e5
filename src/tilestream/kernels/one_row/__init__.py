"""Layers of one row: the grid divides the columns of several products, and each CTA makes all of what they read."""
