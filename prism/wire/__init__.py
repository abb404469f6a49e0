"""What crosses a process border: versioned messages (msgpack) and the names of Redis keys. `mailbox` alone does I/O
(ZeroMQ)."""
