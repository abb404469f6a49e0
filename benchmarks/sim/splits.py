"""Which traces policies are tuned on, and which they are judged on. Nothing else may choose.

A generated trace is its preset and its draw (the generator's seed). Draws 1 to 99 are for tuning: whoever changes a
policy or a rival's setting looks at these, as often as wanted. Draws from 101 on are for judging: results in
docs/results are of these, a policy is not changed because of one, and a look at single decisions in one of them uses it
up (name it in :data:`SPENT` and take the next). Recorded traces are split by file.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class Split(StrEnum):
    TUNING = "tuning"
    JUDGING = "judging"


_FIRST: Final = {Split.TUNING: 1, Split.JUDGING: 101}
_LAST: Final = {Split.TUNING: 99, Split.JUDGING: 999}
SPENT: Final = frozenset((*range(101, 625), *range(697, 757)))
"""Draws for judging that somebody has looked into; they are tuning draws from then on. 101 to 103: how first maps are
judged was changed after figures 7 and 12 had been seen on them. 104 to 111: admission by promises was made because of
what their figures showed. 112 to 115: that promises are kept with a chance, because of theirs.
116 to 119: that what answers have suffered so far counts, because of theirs. 120 to 130: results were looked into on
them, and that models in use give way to their neighbours' KV was made because of 128 and 129. 131 to 134: that rule was
looked at on them. 135 to 144: decisions were looked into in 136 and 142, and turning models away was tried on all.
145 to 154: whether its constants should be others was asked of them.
155 to 162 (figure 10) and 173 to 180 (engines that stand still): results were looked at on them, and what came next was
chosen knowing these; 163 and 164 lie between.
165 to 172: engines that stand still were made because of what figure 7 showed on them.
181 to 188 (figure 12): decisions were looked into in 185.
189 to 204 (figures 7 and 10): what to look into next was chosen by what they showed; in 197 to 204 decisions were
looked into, and first places of models of which nothing is known were chosen by what they and 1 to 24 showed.
205 to 212 (figure 7) and 213 to 230 (figure 10): what to look into next was chosen by what they showed.
231 to 248 (figure 10): judged moves where memory is ample, and that instances which stand ready cost there was seen.
249 to 257 (figure 12): judged prompts that wait for answers.
258 to 260, 266 to 269, 278, 279, 283, 290, 293 (figure 12): judged fewer instances for bursts that can wait.
261 to 265 (``live_scaling.mode``): decisions were looked into.
280 to 282 and 284 to 286 (ablation), 287 to 289, 291, 292 and 318 to 320 (figure 10) and 321 to 324 (figure 7 over
GPUs) judged the same rules as 270 to 277 (recorded sources), 294 to 301 and 310 to 317 (figure 12) and 302 to 309
(figure 7): first maps by mean and bursts.
325 to 340 (figure 12): judged requests that go where none waits, and bursts that grow; decisions were looked into in
332, and that prompts with time wait while neighbours make steps too slow was looked at on 325 to 332.
341 to 356 (figure 12), 357 to 404 (figure 7), 405 to 416 (figure 7 over GPUs), 417 to 432 (recorded sources) and 433 to
444 (figure 7 where memory does not bind): judged promises that count on engines standing still for each other; single
decisions were looked into in 437, 438, 442 and 444.
445 to 468 (figure 7 where memory does not bind), 469 to 484 (recorded sources), 485 to 532 (figure 7), 533 to 544
(figure 7 over GPUs), 545 to 560 (figure 12), 561 to 568 and 577 to 592 (figure 10), 569 to 574 (ablation) and 593 to
600 (what is assumed of the GPU; 575 and 576 lie between): judged spare instances that give way to requests that wait.
601 to 616 (figure 12 and recorded sources; figure 7 over GPUs to 612) and 617 to 624 (two hundred models): judged idle
models that leave for a burst; decisions were looked into in 601, 612 and 614 of figure 12.
625 to 684 (drawn set-ups) and 685 to 696 were judged on, whom memory cannot hold, and nobody has looked into them: they
are not among these. 697 to 756 (drawn set-ups): judged when turned away models have their turns, of which variants were
compared on them afterwards, and of prompts that need not wait. 757 to 816 (drawn set-ups) judged the latter, and nobody
has looked into them. What is judged next begins at 817."""
RECORDED: Final = {
    Split.TUNING: ("arena_prism_e2e_8m.parquet", "arena_vtc_27m.parquet", "hyperbolic_fig_7m_digitised.parquet"),
    Split.JUDGING: ("azure2023_conv.parquet", "mooncake_conversation.parquet", "semisynth_servegen_multi_2h.parquet"),
}
"""By name, as traces/README.md has them; ``composite.py`` has moments of most of them in all of its draws. The samples
in ``traces/`` of the repository are for tuning."""


def draws(split: Split, count: int, first: int = 0) -> tuple[int, ...]:
    """The first ``count`` draws of ``split``, from ``first`` on, that nobody has used up."""
    found = [draw for draw in range(max(first, _FIRST[split]), _LAST[split] + 1) if draw not in SPENT]
    return tuple(found[:count])


def split_of(draw: int) -> Split:
    """Where a draw belongs."""
    return Split.JUDGING if draw >= _FIRST[Split.JUDGING] and draw not in SPENT else Split.TUNING
