"""Serving while weights arrive: who runs which part of a model meanwhile, and when each goes on alone. Pure."""
