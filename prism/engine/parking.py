"""Who stands ready without a model: single workers, and the ranks of a tensor-parallel engine that stay together.

Ranks that have met keep their process groups, which no other shape can use: they are parked, taken and ended as a
whole.
"""

from __future__ import annotations

from collections.abc import Sequence

from prism.core.ids import DeviceId
from prism.engine.link import WorkerLink

Team = tuple[WorkerLink, ...]
"""The workers of one engine, by rank."""


def devices_of(team: Team) -> tuple[DeviceId, ...]:
    return tuple(link.device for link in team)


class ParkedTeams:
    """Teams without a model, the most recently used first. It forks and ends nobody."""

    def __init__(self) -> None:
        self._teams: list[Team] = []

    def __contains__(self, link: WorkerLink) -> bool:
        return any(link in team for team in self._teams)

    def put(self, team: Team, *, used: bool) -> None:
        """``used``: a model has just left it. New teams are taken last and given up first."""
        self._teams.insert(0 if used else len(self._teams), team)

    def take(self, devices: Sequence[DeviceId], shape: str, build: str = "") -> Team | None:
        """A team whose ranks stand on ``devices`` in this order, with process groups of ``shape``; None: there is
        none. Best one that keeps ``build``, else one that keeps least: each model drives out another there."""
        teams = self.on(devices, shape)
        if not teams:
            return None
        found = min(teams, key=lambda team: (build not in team[0].kept, len(team[0].kept)))
        self._teams.remove(found)
        return found

    def on(self, devices: Sequence[DeviceId], shape: str) -> list[Team]:
        """Teams that stand on exactly ``devices`` and have process groups of ``shape``."""
        return [team for team in self._teams if devices_of(team) == tuple(devices) and team[0].shape == shape]

    def helper(self, device: DeviceId) -> WorkerLink | None:
        """A worker on ``device`` that could help others meanwhile: the one that is taken last."""
        return next((link for team in reversed(self._teams) for link in team if link.device == device), None)

    def give_up(self, device: DeviceId) -> Team:
        """The team with a worker on ``device`` that was not used for longest; empty: there is none."""
        found = next((team for team in reversed(self._teams) if device in devices_of(team)), ())
        if found:
            self._teams.remove(found)
        return found

    def lose(self, link: WorkerLink) -> Team:
        """``link`` is gone: its team is of no use any more. Returns it; empty: ``link`` was not parked."""
        found = next((team for team in self._teams if link in team), ())
        if found:
            self._teams.remove(found)
        return found
