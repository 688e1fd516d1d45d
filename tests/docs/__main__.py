"""Run every command of the documentation: ``python -m tests.docs [words] [--write]``.

    words     only pages in whose names one of these occurs
    --write   write what is printed now; without it, say which pages are stale

Outputs are those that torch 2.13 gives.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from tests.docs.outputs import ROOT, UnexpectedEndError
from tests.docs.pages import everything, forgotten


def main(words: Sequence[str], *, write: bool) -> int:
    """Make the pages again."""
    stale = 0
    for path, make in everything().items():
        name = str(path.relative_to(ROOT))
        if words and not any(word in name for word in words):
            continue
        start = time.perf_counter()
        try:
            text = make()
        except UnexpectedEndError as error:
            stale += 1
            print(f"STALE  {name}: {error}", flush=True)
            continue
        seconds = time.perf_counter() - start
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        stale += 1
        print(f"{'written' if write else 'STALE'} {seconds:5.1f} s  {name}", flush=True)
        if write:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    for path in forgotten():
        stale += 1
        print(f"{'removed' if write else 'STALE'}  {path.relative_to(ROOT)}")
        if write:
            path.unlink()
    print(f"{stale} page(s) {'changed' if write else 'stale'}")
    return 0 if write else min(stale, 1)


if __name__ == "__main__":
    asked = [word for word in sys.argv[1:] if word != "--write"]
    sys.exit(main(asked, write="--write" in sys.argv[1:]))
