"""The front door's record of one request's tokens: the truth about what the client's stream has."""

from __future__ import annotations

from dataclasses import dataclass, field

from prism.wire.messages import TokenItem


@dataclass(frozen=True, slots=True)
class Fresh:
    """What an item added. ``skipped`` of its tokens were known already (their log-probabilities must be skipped
    too)."""

    token_ids: list[int]
    skipped: int
    finish: dict[str, object] | None


@dataclass(slots=True)
class TokenLog:
    """Pure state: items in, fresh tokens out. Invariant: ``tokens`` only grows, and never after ``finish`` is set."""

    attempt: int = 1
    tokens: list[int] = field(default_factory=list)
    finish: dict[str, object] | None = None
    gaps: int = 0
    """Items that began behind the end of the log: tokens before them were lost on the way."""

    def take(self, item: TokenItem) -> Fresh | None:
        """Adds what is new in ``item``; None when nothing is: a superseded attempt, a duplicate, or a gap."""
        if item.attempt != self.attempt or self.finish is not None:
            return None
        known = len(self.tokens) - item.start
        if known < 0:
            self.gaps += 1
            return None
        fresh = item.token_ids[known:] if known else item.token_ids
        if not fresh and item.finish is None:
            return None
        self.tokens.extend(fresh)
        self.finish = item.finish
        return Fresh(fresh, min(known, len(item.token_ids)), item.finish)

    def complete(self, total_tokens: int) -> bool:
        """Whether the stream has its finish reason and all ``total_tokens``."""
        return self.finish is not None and len(self.tokens) >= total_tokens

    def supersede(self) -> int:
        """Starts the next attempt, from the tokens that are here; returns its number."""
        self.attempt += 1
        return self.attempt
