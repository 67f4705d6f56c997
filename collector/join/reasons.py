"""Why a row was not made, and what journeys and summaries disagreed about; closed sets, one counter row each."""

from __future__ import annotations

import enum


class RowDrop(enum.StrEnum):
    """An interval that gives no row."""

    IDLE = "idle"
    INCOMPLETE = "incomplete"
    WARM_UP = "warm_up"
    TOO_LONG = "too_long"
    TIME_ORDER = "time_order"
    RESTART = "restart"
    TOLD_BY_STEPS = "told_by_steps"
    """Made from request spans, where engines send their steps themselves."""
    WHICH_CONFIG = "which_config"
    """Made from request spans beside engines of several configurations."""


class JoinEvent(enum.StrEnum):
    """What the join met besides rows."""

    STEP_MATCHED = "step_matched"
    STEP_MISMATCHED = "step_mismatched"
    STEP_DUPLICATE = "step_duplicate"
    STEP_LATE = "step_late"
    JOURNEY_LATE = "journey_late"
    JOURNEY_UNSCHEDULED = "journey_unscheduled"
    API_UNMATCHED = "api_unmatched"
    ENGINE_RESTART = "engine_restart"
    ENGINE_CONFLICT = "engine_conflict"
    ENGINE_EVICTED = "engine_evicted"
    DOUBLE_EMITTER = "double_emitter"
    OPEN_REQUESTS_EVICTED = "open_requests_evicted"
    SPECULATIVE_STEP = "speculative_step"
    FACT_CONFLICT = "fact_conflict"
