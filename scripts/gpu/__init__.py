"""What to run in the first minutes on a GPU: a kit to carry to a machine without registries, and six stages of checks.

See ``scripts/gpu/README.md`` for the order of commands and ``docs/gpu.md`` for what the numbers mean.
"""
