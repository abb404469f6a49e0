"""What can be seen from outside: metric names (:mod:`prism.obs.names`), structured logs, the decision log."""
