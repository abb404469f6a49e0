"""What is documented is really there: every metric is set and every setting read somewhere outside its definition."""

from __future__ import annotations

import re
from pathlib import Path

from prism.config.sections import live, machine, model, server
from prism.config.sections.base import Section
from prism.core.settings import ClusterSettings, GpuSettings
from prism.obs import names
from prism.obs.definition import MetricDef

PACKAGE = Path(__file__).parents[2] / "prism"
SECTIONS = [
    kind
    for module in (live, machine, model, server)
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, Section) and kind is not Section
]


def sources(*without: str) -> str:
    files = [path for path in PACKAGE.rglob("*.py") if not path.is_relative_to(PACKAGE / "sim")]
    skipped = [PACKAGE / part for part in without]
    return "\n".join(path.read_text() for path in files if not any(path.is_relative_to(part) for part in skipped))


def test_every_metric_is_set() -> None:
    code = sources("obs/names.py")
    constants = [name for name, value in vars(names).items() if isinstance(value, MetricDef)]
    assert len(constants) == len(names.METRICS)
    unused = [name for name in constants if not re.search(rf"\bnames\.{name}\b", code)]
    assert not unused, f"nobody sets {unused}"


def test_every_setting_is_read() -> None:
    code = sources("config/sections", "core/settings.py", "core/specs.py", "config/reload.py")
    attributes = {name for kind in SECTIONS for name in kind.__struct_fields__}
    attributes |= {name for kind in (ClusterSettings, GpuSettings) for name in kind.__dataclass_fields__}
    unused = sorted(name for name in attributes if not re.search(rf"\.{name}\b", code))
    assert not unused, f"nobody reads {unused}"
