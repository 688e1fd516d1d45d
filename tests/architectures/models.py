"""The table: every architecture that is trained, by name."""

from __future__ import annotations

from tests.architectures.architecture import Architecture
from tests.architectures.senses import SENSES
from tests.architectures.text import TEXT

ARCHITECTURES: dict[str, Architecture] = {a.name: a for a in (*TEXT, *SENSES)}
