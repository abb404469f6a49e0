"""Pytest plugins in place of what the suites start: loaded as ``stand_ins`` beside their own ``tests`` package."""
