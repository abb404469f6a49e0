"""Discrete-event world: the production schedulers decide, engines, memory, links and clock are modelled.

See ``docs/sim.md`` for what each model assumes and how to add a GPU, a model, a policy or a rival.
"""
