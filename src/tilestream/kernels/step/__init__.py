"""A decode step as one persistent kernel."""
