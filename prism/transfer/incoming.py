"""One window on its way to this machine: the reception, the threads that pull, and the server that passes it on."""

from __future__ import annotations

from dataclasses import dataclass

from prism.transfer.one_sided import OneSidedNetwork
from prism.transfer.progress import ReceptionProgress
from prism.transfer.pull_lanes import DEAD_S, PullLanes
from prism.transfer.reception import Reception
from prism.transfer.server import TransferServer
from prism.transfer.session import NodePlan
from prism.transfer.windows import Landing


@dataclass(frozen=True, slots=True)
class PullOptions:
    """How a window is pulled."""

    dead_s: float = DEAD_S
    """Silence after which a peer counts as dead."""
    hold: bool = False
    """Make memory and connections ready ahead of need; pulling begins with :meth:`IncomingWindow.start_pulling`."""
    watch_only: bool = False
    """Somebody else on this machine pulls it into the same memory."""


class IncomingWindow:
    """Receives the window of ``plan`` into ``landing`` from its making on, until :meth:`close`. ``server``, this
    machine's, passes pieces on as the plan says. Usable as it arrives: see :meth:`await_leaf`."""

    def __init__(
        self, server: TransferServer, plan: NodePlan, landing: Landing, options: PullOptions | None = None
    ) -> None:
        options = options or PullOptions()
        self.plan, self._server, self._landing = plan, server, landing
        self._reception = Reception(plan, landing, lambda: server.on_arrived(plan.session))
        pulls = not options.watch_only
        server.join_session(plan, told=pulls)
        self._lanes = PullLanes(self._reception, server.secret, options.dead_s, self._network()) if pulls else None
        if self._lanes is not None:
            self._lanes.start_threads()
            if options.hold:
                landing.populate(0, landing.cut.nbytes)
                self._lanes.connected.wait()
            else:
                self._lanes.go.set()

    def _network(self) -> OneSidedNetwork | None:
        """The plan's way to move bytes. Raises ``KeyError`` for one this machine does not have."""
        return None if self.plan.network == "tcp" else self._server.networks[self.plan.network]

    def start_pulling(self) -> None:
        """Begins to pull, if it was held back."""
        if self._lanes is not None:
            self._lanes.go.set()

    @property
    def progress(self) -> ReceptionProgress:
        return self._reception.progress

    @property
    def arrived_s(self) -> dict[int, float]:
        """When each piece was here and verified (the monotonic clock)."""
        return dict(self._reception.arrived_s)

    @property
    def stopped(self) -> bool:
        """Nothing more is pulled although not everything is here."""
        return self._reception.stopped

    @property
    def failed(self) -> BaseException | None:
        """What ended the reception."""
        return self._reception.failed

    def cancel(self) -> None:
        """Stops pulling; what has arrived stays and is passed on."""
        self._reception.stop()

    def await_leaf(self, leaf: int, timeout_s: float) -> bool:
        """Whether ``leaf`` is here and verified; waits for it until the reception has ended, ``timeout_s`` at most. For
        one thread."""
        if not self._landing.has(range(leaf, leaf + 1)):
            self._reception.await_leaf(leaf, timeout_s)
        return self._landing.has(range(leaf, leaf + 1))

    def close(self) -> None:
        """Ends pulling, and waits until no thread writes into the landing any more."""
        self._reception.stop()
        if self._lanes is not None:
            self._lanes.go.set()
            self._lanes.join_threads()
        for network in self._server.networks.values():
            network.forget(self._landing.span)
