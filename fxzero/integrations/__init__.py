"""fxzero where people already train: a module for each tool, which nothing else imports.

`deepspeed` reads DeepSpeed's JSON · `transformers` is a Trainer · `accelerate` a plugin ·
`lightning` a strategy. ``import fxzero`` loads none of them; each needs the extra of its name.
"""
