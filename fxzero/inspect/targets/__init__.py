"""What is looked at: a model, and the batch that it is called with.

package.module:factory     train.py:build            a function of yours
gpt-1t                     a preset                  shapes that people know by name
hf:llama                   hf:path/to/config.json    a model of transformers, by its config
"""

from fxzero.inspect.targets.batch import Batch
from fxzero.inspect.targets.batches import DEFAULT_ROWS, Sizes, model_and_batch
from fxzero.inspect.targets.calls import raised_at
from fxzero.inspect.targets.target import Target, load

__all__ = ["DEFAULT_ROWS", "Batch", "Sizes", "Target", "load", "model_and_batch", "raised_at"]
