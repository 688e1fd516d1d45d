"""DeepSpeed's JSON, read: `from_deepspeed`. DeepSpeed itself is not needed.

`schema` and the tables beside it have every key; `walk` holds a configuration against them, `autos`
resolves "auto", and what is mapped is mapped by `zero`, `precisions`, `batches`, `map_optimizer`
and `map_schedule`. `result` trains by what comes of it, `engine` in DeepSpeed's three calls.
"""

from fxzero.integrations.deepspeed.convert import Examined, examine, from_deepspeed
from fxzero.integrations.deepspeed.engine import Engine
from fxzero.integrations.deepspeed.lines import Line, Verdict
from fxzero.integrations.deepspeed.result import FromDeepSpeed
from fxzero.integrations.deepspeed.schedules import DeepSpeedSchedule

__all__ = [
    "DeepSpeedSchedule",
    "Engine",
    "Examined",
    "FromDeepSpeed",
    "Line",
    "Verdict",
    "examine",
    "from_deepspeed",
]
