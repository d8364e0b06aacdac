"""What the fork server of the tests imports, once for all workers.

A worker imports the test file that its source is from, and all that this file imports.
"""

import gc
import importlib

import enqueuer

for module in ("asyncio", "helpers", "hypothesis.strategies", "psutil", "pytest"):
    importlib.import_module(module)
for name in enqueuer.__all__:
    getattr(enqueuer, name)
# A garbage collection in a worker would otherwise touch, and so copy, all of it.
gc.freeze()
