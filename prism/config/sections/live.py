"""The section of a catalog about instances that serve while their weights arrive."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, field

from prism.config.sections.base import Section
from prism.config.units import Seconds
from prism.core.settings import LiveMode


class LiveScalingConfig(Section, frozen=True, kw_only=True):
    """Further instances of a model that serve before their weights are there."""

    mode: Annotated[
        LiveMode,
        Meta(
            description="When an instance that joins others of its model begins serving: with all its weights (whole), "
            "at once, with one that has everything running the layers that are still to come (pair), so and over "
            "others that come with it as soon as they have all layers between them (pipelines), or, when requests "
            "wait, in whichever of these ways is estimated to serve most within their objective, and with all its "
            "weights where nothing waits or its engines can do nothing else (auto). But for whole everywhere, devices "
            "lend memory for it, as `kv.lend_keep_fraction` says."
        ),
    ] = LiveMode.AUTO
    hop_s: Annotated[
        Seconds,
        Meta(
            description="What it takes to ask an engine of another machine and to have the beginning of its answer. "
            "The choice of the way (auto) counts it for every stop of a route that leads to another machine."
        ),
    ] = field(name="hop", default_factory=lambda: Seconds(0.0005))
