"""The controller: one per fleet, by a lease in the store.

It feeds :class:`prism.scheduler.cluster.ClusterScheduler` with what the node agents report and carries its decisions
out. It keeps nothing that a successor could not rebuild from the store and the agents' reports.
"""
