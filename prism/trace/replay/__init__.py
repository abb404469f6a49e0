"""Replay: send a trace to any OpenAI-compatible server at the trace's own times and measure at the client.

Two processes. The *parent* (:mod:`~prism.trace.replay.run`) plans, shows progress, watches the server and makes the
report. The *sender* (:mod:`~prism.trace.replay.sender`) does nothing but send on time and take tokens: nothing that the
parent does can delay it.
"""
