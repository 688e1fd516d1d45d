"""Is this machine all right: what works, what does not, what to do, and how fast it is."""

from fxzero.doctor.examine import Examination, examine
from fxzero.doctor.verdicts import Checked, Verdict

__all__ = ["Checked", "Examination", "Verdict", "examine"]
