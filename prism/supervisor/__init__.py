"""The supervisor behind ``prism-serve`` and ``prism-node``: starts the processes of one machine in order, restarts
whatever dies, and leaves nothing behind when it stops."""
