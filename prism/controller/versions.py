"""Machines whose agents speak another version of the messages: they get no work, and the log says why.

All machines of a fleet run the same version, which is checked when one joins. Afterwards the server may be restarted
with another one while agents go on; what they say may then mean something else, or cannot be read at all.
"""

from __future__ import annotations

import logging

from prism.core.ids import NodeId
from prism.store.values import AgentRecord
from prism.wire.message import PROTOCOL_VERSION
from prism.wire.messages import AgentReport

log = logging.getLogger(__name__)


class Versions:
    """Asked about every report, and told every second which agents there are: one whose reports cannot be read still
    has its record in the store."""

    def __init__(self) -> None:
        self._told: set[tuple[str, int]] = set()

    def agree(self, report: AgentReport) -> bool:
        """Whether the report means what it says here."""
        return self._agree(report.node, report.protocol)

    def look(self, record: AgentRecord) -> None:
        """Logs it once if the agent speaks another version."""
        self._agree(record.node, record.protocol)

    def _agree(self, node: NodeId | str, protocol: int) -> bool:
        if protocol == PROTOCOL_VERSION:
            return True
        if (node, protocol) not in self._told:
            self._told.add((node, protocol))
            log.error(
                "machine %s gets no work: its agent speaks version %d of Prism's messages, this controller version %d. "
                "Stop prism-node there, install the server's version of Prism, and start it again",
                node,
                protocol,
                PROTOCOL_VERSION,
            )
        return False
