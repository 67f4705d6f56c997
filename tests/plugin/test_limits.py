"""What the plugin holds while its receiver is away."""

from __future__ import annotations

from tracefit_vllm.sender import GIVE_UP_S
from tracefit_vllm.settings import Settings


def test_a_minute_without_the_receiver_loses_nothing_at_300_steps_a_second():
    assert GIVE_UP_S > 60
    assert Settings().queue_items >= 60 * 300
