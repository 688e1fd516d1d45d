"""One decision for all ranks: the first rank to decide posts it, the others take it.

Costs may differ between ranks (a smaller last batch on one of them), decisions must not: a rank
that ordered its collectives otherwise would hang. Nothing is waited for. A rank that compiles
again, alone, takes the decision that the others run by already.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from fxzero._compat import default_store

_decided: dict[str, str] = {}


def agreed(identity: str, question: str) -> Any:
    """What others have answered; None if nobody was asked yet, or there is no other rank."""
    digest = hashlib.sha256(question.encode()).hexdigest()
    key = f"fxzero/decisions/{identity}/{digest}"
    store = default_store()
    if store is None:
        return None
    if key not in _decided and store.check([key]):
        _decided[key] = store.get(key).decode()
    found = _decided.get(key)
    return None if found is None else json.loads(found)


def agree(identity: str, question: str, answer: Any) -> Any:
    """The answer of whoever was first to be asked.

    Args:
        identity: what the ranks agree to call the model.
        question: equal where the answer must be.
        answer: this rank's own, as JSON can hold it.
    """
    digest = hashlib.sha256(question.encode()).hexdigest()
    key = f"fxzero/decisions/{identity}/{digest}"
    mine = json.dumps(answer)
    store = default_store()
    if store is None:
        return json.loads(mine)
    if key not in _decided:
        _decided[key] = store.compare_set(key, "", mine).decode()
    return json.loads(_decided[key])
