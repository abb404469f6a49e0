"""Pure state machines that take events and return effects: one per device (:mod:`.gpu`), one per cluster
(:mod:`.cluster` and its rivals). The live shells and the simulator run the same classes."""

from __future__ import annotations

from collections.abc import Iterable

from prism.core.settings import ClusterSettings, PolicyName
from prism.core.specs import ModelSpec
from prism.scheduler.base import ClusterScheduler
from prism.scheduler.cluster import PrismScheduler
from prism.scheduler.rivals import MuxServeScheduler, QlmScheduler, StaticScheduler


def cluster_scheduler(
    settings: ClusterSettings, catalog: Iterable[ModelSpec], first_generation: int = 1
) -> ClusterScheduler:
    """The global scheduler of the policy named in ``settings``.

    ``first_generation`` must be larger than any that an earlier scheduler of the same fleet has given out (the shell
    keeps count, or derives it from the clock)."""
    makers: dict[PolicyName, type[ClusterScheduler]] = {
        PolicyName.PRISM: PrismScheduler,
        PolicyName.STATIC: StaticScheduler,
        PolicyName.MUXSERVE: MuxServeScheduler,
        PolicyName.QLM: QlmScheduler,
    }
    return makers[settings.policy](settings, catalog, first_generation)
