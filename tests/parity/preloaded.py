"""What the fork server finds out once, and every rank would find out by itself.

Before it generates its first kernel Inductor asks the compiler and a process of its own for each
set of vector instructions: two seconds of a processor, where the answers are on disk already.
"""

from __future__ import annotations

from torch._inductor import cpu_vec_isa

cpu_vec_isa.pick_vec_isa()
