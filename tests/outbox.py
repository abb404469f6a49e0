"""An outbox that posts nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

from prism.wire.message import Message


@dataclass
class NotedOutbox:
    """Stands in for :class:`prism.wire.mailbox.Outbox`: notes what was sent to whom."""

    sent: list[tuple[str, Message]] = field(default_factory=list)

    def send(self, address: str, message: Message) -> bool:
        self.sent.append((address, message))
        return True

    def forget(self, address: str) -> None:
        pass

    def of(self, kind: type) -> list[Message]:
        return [m for _, m in self.sent if isinstance(m, kind)]
