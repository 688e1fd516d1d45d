"""Settings for Hydra: `cluster/` are machines, `fxzero/` is the compiler.

An application of your own takes the compiler's group by two lines of its primary config:

    defaults: [{fxzero: default}]
    hydra: {searchpath: [pkg://fxzero.conf]}
"""
