"""Passes: one function each, Pipeline in and Pipeline out. ``plan.recipes`` lists their order."""
