"""An activation under way: the workers that are to become an engine's ranks, and what they have answered."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from prism.core.ids import DeviceId
from prism.core.specs import ModelSpec
from prism.engine.commands import Activated, NotActivated, Report
from prism.engine.errors import ActivationCause, CannotActivate
from prism.engine.link import WorkerLink


class Activating:
    """Owns the ``links`` until all have answered or one has failed."""

    def __init__(self, spec: ModelSpec, links: Sequence[WorkerLink]) -> None:
        loop = asyncio.get_running_loop()
        self._spec = spec
        self._answers: dict[str, asyncio.Future[Activated]] = {link.worker: loop.create_future() for link in links}
        self._devices: tuple[DeviceId, ...] = tuple(link.device for link in links)
        for link in links:
            link.hand_to(self)

    async def done(self, timeout_s: float) -> Activated:
        """The slowest rank's answer, with the help that all had. Raises :class:`CannotActivate`."""
        try:
            async with asyncio.timeout(timeout_s):
                answers = await asyncio.gather(*self._answers.values())
        except TimeoutError:
            raise self._error(ActivationCause.TIMEOUT, f"not ready after {timeout_s:.0f} s") from None
        finally:
            for answer in self._answers.values():
                answer.cancel()
        helped = {device: nbytes for answer in answers for device, nbytes in answer.helped_bytes.items()}
        slowest = max(answers, key=lambda a: sum(a.phases.values()))
        return msgspec.structs.replace(slowest, helped_bytes=helped)

    def on_report(self, link: WorkerLink, report: Report) -> None:
        answer = self._answers[link.worker]
        if isinstance(report, Activated) and not answer.done():
            answer.set_result(report)
        elif isinstance(report, NotActivated) and not answer.done():
            answer.set_exception(self._error(ActivationCause(report.cause), report.detail))

    def on_gone(self, link: WorkerLink) -> None:
        answer = self._answers[link.worker]
        if not answer.done():
            answer.set_exception(self._error(ActivationCause.ENGINE_DIED, link.describe_end()))

    def _error(self, cause: ActivationCause, detail: str) -> CannotActivate:
        return CannotActivate(self._spec.name, self._devices, cause, detail)
