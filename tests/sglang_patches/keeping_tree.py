"""What SGLang's tree is about to drop is kept, as the hooks of an engine have it."""

from __future__ import annotations

from typing import Any

import pytest


def keep_what_is_dropped(patch: pytest.MonkeyPatch, part: Any) -> None:
    """``part``: the class of the tree's components whose points leave (windows, states)."""
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache as Tree

    from sglang_patches import kv_move

    evict, leaf, point = Tree.evict, Tree._evict_device_leaf, part.evict_component

    def evict_leaf(tree: Any, node: Any, tracker: Any) -> None:
        kv_move.keep_leaf(tree, node, tracker)
        leaf(tree, node, tracker)

    def evict_point(component: Any, node: Any, **target: Any) -> Any:
        kv_move.keep_point(component, node, **target)
        return point(component, node, **target)

    patch.setattr(kv_move, "_EVICT_S", 60.0)  # what is lost where a machine is slow is no fault
    patch.setattr(Tree, "evict", lambda tree, params: kv_move.begin_evicting(evict, tree, params))
    patch.setattr(Tree, "_evict_device_leaf", evict_leaf)
    patch.setattr(part, "evict_component", evict_point)
