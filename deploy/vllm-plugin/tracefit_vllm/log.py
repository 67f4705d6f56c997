"""The plugin's one logger and its guard.

The name lies below ``vllm``: vLLM configures only its own loggers, a line of any other one would not be printed.
"""

from __future__ import annotations

import logging
from typing import Final

LOG: Final = logging.getLogger("vllm.plugins.tracefit")
