"""Edits of ``foretrace predict`` that are switched on by a word."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracer.errors import ForetraceError

if TYPE_CHECKING:
    from graph_predictor.whatif import Edit


def work_edits(recompute: str | None, *, fuse_elementwise: bool, flash_attention: bool, overlap_loading: bool,
               compiled: bool, free_launches: bool, no_waits: bool, hide_collectives: bool) -> list[Edit]:
    """The edits that were asked for.

    Raises:
        ForetraceError: ``recompute`` is neither "on" nor "off".
    """
    from graph_predictor import whatif

    if recompute not in (None, "on", "off"):
        raise ForetraceError(f"--recompute {recompute} is not known: it is on or off.")
    wanted: list[tuple[bool, Edit]] = [
        (fuse_elementwise, whatif.FuseElementwise()), (flash_attention, whatif.FlashAttention()),
        (recompute is not None, whatif.Recompute(recompute == "on")), (overlap_loading, whatif.OverlapLoading()),
        (compiled, whatif.Compile()), (free_launches, whatif.FreeLaunches()), (no_waits, whatif.NoWaits()),
        (hide_collectives, whatif.HideCollectives())]
    return [edit for asked, edit in wanted if asked]
