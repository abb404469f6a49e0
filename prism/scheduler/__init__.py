"""Pure state machines that take events and return effects: one per device (:mod:`.gpu`), one per cluster
(:mod:`.cluster`, with a policy). The live shells and the simulator run the same classes."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prism.core.settings import ClusterSettings, PolicyName
from prism.core.specs import ModelSpec
from prism.scheduler.books import Books
from prism.scheduler.cluster import ClusterScheduler
from prism.scheduler.cluster_policy import ClusterPolicy
from prism.scheduler.prism_policy import PrismPolicy
from prism.scheduler.rivals import MuxServePolicy, QlmPolicy, StaticPolicy
from prism.scheduler.serverless import ServerlessPolicy


def cluster_scheduler(
    settings: ClusterSettings, catalog: Iterable[ModelSpec], first_generation: int = 1, takes_over: bool = False
) -> ClusterScheduler:
    """The global scheduler with the policy named in ``settings``.

    ``first_generation`` must be larger than any that an earlier scheduler of the same fleet has given out (the shell
    keeps count, or derives it from the clock). ``takes_over``: see :class:`ClusterScheduler`."""
    makers: dict[PolicyName, Callable[[Books], ClusterPolicy]] = {
        PolicyName.PRISM: PrismPolicy,
        PolicyName.STATIC: StaticPolicy,
        PolicyName.MUXSERVE: MuxServePolicy,
        PolicyName.QLM: QlmPolicy,
        PolicyName.SERVERLESSLLM: ServerlessPolicy,
    }
    return ClusterScheduler(settings, catalog, makers[settings.policy], first_generation, takes_over)
