"""What of DeepSpeed means something else in another version.

Read in its releases: gradient_clipping has the default 1.0 since 0.19.3 and had none before;
bf16.check_grad_overflow is on since 0.19.3; WarmupLR without warmup_max_lr rises to the optimizer's
lr since 0.17.2, and to 0.001 before; WarmupCosineLR stays at its end since 0.19.3, and rose again
before. At stages 1 to 3 the window of an fp16 loss scale ends a step later since 0.17. Before 0.16
the first step had another learning rate: such a version is refused.
"""

from __future__ import annotations

import re

from fxzero.errors import ConfigError

Version = tuple[int, ...]

CLIPS_BY_DEFAULT: Version = (0, 19, 3)
CHECKS_BF16: Version = (0, 19, 3)
WARMS_UP_TO_OPTIMIZER: Version = (0, 17, 2)
COSINE_STAYS: Version = (0, 19, 3)
STAIRS_COUNT: Version = (0, 19, 4)
WINDOW_AFTER: Version = (0, 17)
OLDEST: Version = (0, 16)
NEWEST: Version = (0, 19)


def parse_version(text: str | None) -> Version | None:
    """``0.19.8`` as numbers.

    Raises:
        ConfigError: it is no version, or none whose meaning is known here.
    """
    if text is None:
        return None
    match = re.fullmatch(r"v?(\d+)\.(\d+)(?:\.(\d+))?(?:[.+-].*|rc\d+)?", str(text).strip())
    if match is None:
        raise ConfigError(
            f"deepspeed_version={text!r} is no version. Say one such as '0.19.8': "
            'python -c "import deepspeed; print(deepspeed.__version__)"'
        )
    major, minor, patch = (int(part) if part is not None else None for part in match.groups())
    assert major is not None
    assert minor is not None
    if not OLDEST <= (major, minor) <= NEWEST:
        raise ConfigError(
            f"deepspeed_version={text}: what DeepSpeed 0.16 to 0.19 mean is known here. Say the "
            "nearest of them that your configuration means the same in."
        )
    if patch is None:
        raise ConfigError(
            f"deepspeed_version={text}: defaults changed between patches. Say all three numbers, "
            f"such as '{text}.8'."
        )
    return (major, minor, patch)
