"""``cluster.yaml``: the machines, their links and how fast the software around the engines is.

.. code-block:: yaml

    groups:
      - {gpu: H100, nodes: 4, gpus_per_node: 8}
    network: {nic_gbit: 100, nodes_per_leaf: 8, oversubscription: 1}

Every key has a default and a description in :mod:`prism.sim.cluster_sections`; unknown keys are errors.
``docs/sim.md`` explains them together.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import jsonschema
import msgspec

from prism.config.errors import CatalogError
from prism.config.schema import problems_in, section_schema
from prism.config.units import Seconds, parse_duration_s, parse_size_bytes
from prism.config.yaml_source import YamlSource, read_yaml
from prism.core.errors import InvalidValue
from prism.sim.cluster_sections import Cluster
from prism.sim.fault_check import fault_mistakes
from prism.sim.gpus import GPUS, RATES


def load_cluster(path: Path) -> Cluster:
    """The cluster in the YAML file at ``path``. Raises :class:`CatalogError` with everything that is wrong."""
    try:
        source = read_yaml(path)
    except CatalogError as error:
        raise _mistakes(error.problems) from error
    return _checked(source)


def parse_cluster(data: object, where: str) -> Cluster:
    """The cluster in parsed YAML; mistakes are said to be in ``where``. Raises :class:`CatalogError`."""
    return _checked(YamlSource(where, data))


def _checked(source: YamlSource) -> Cluster:
    problems = problems_in(source, _validator())
    if not problems:
        cluster = _converted(source)
        problems = [*_unknown_gpus(cluster, source), *_unknown_rates(cluster, source)]
        if not problems:
            problems = [
                source.problem(("faults", m.index, m.key), m.value, m.why, m.choices) for m in fault_mistakes(cluster)
            ]
        if not problems:
            return cluster
    raise _mistakes(problems)


def _converted(source: YamlSource) -> Cluster:
    try:
        return msgspec.convert(source.data, Cluster, dec_hook=_convert)
    except msgspec.ValidationError as error:  # what the schema allows and the objects refuse, such as 1e300 for an int
        raise _mistakes([source.problem((), "...", str(error))]) from error


def _unknown_gpus(cluster: Cluster, source: YamlSource) -> list[InvalidValue]:
    return [
        source.problem(("groups", index, "gpu"), group.gpu, "is no GPU the simulator knows", tuple(GPUS))
        for index, group in enumerate(cluster.groups)
        if group.gpu not in GPUS
    ]


def _unknown_rates(cluster: Cluster, source: YamlSource) -> list[InvalidValue]:
    return [
        source.problem(("groups", index, "rates", key), value, "is no rate of a GPU", RATES)
        for index, group in enumerate(cluster.groups)
        for key, value in group.rates.items()
        if key not in RATES
    ]


def _mistakes(problems: Sequence[InvalidValue]) -> CatalogError:
    """What concerns the file as a whole (``catalog``, for those who read it) is called after its kind."""
    return CatalogError(
        [InvalidValue("cluster", p.value, p.why, p.choices, p.where) if p.key == "catalog" else p for p in problems]
    )


def _convert(kind: type, value: object) -> object:
    return parse_duration_s(value) if kind is Seconds else parse_size_bytes(value)


@lru_cache(maxsize=1)
def _validator() -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(section_schema(Cluster, "Prism simulated cluster"))
