"""The node agent: one process per machine. It owns the machine's devices and engines, takes requests from their queues,
lets :class:`prism.scheduler.gpu.GpuScheduler` decide, and carries the decisions out."""
