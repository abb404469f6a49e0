"""Sections of ``docs/models.md`` about quantised checkpoints, adapters, and models that answer with no text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import Final

from prism.config.adapters import LAYER_OF
from prism.server.kinds import served_at
from prism.core.specs import ModelKind
from tests.engine.test_lora import SHAPES
from tests.engine.test_pooling import FAMILIES
from tests.engine.test_quantised import MADE
