"""The processes of a run: placement, Ray actors with typed methods, supervision. The only package that imports ray.

A holder describes the weights that one rank stores: see megarl.resharding.piece.Holder.
"""

import gc
import os
import sys

# Ray's ports reject clients without the run's token. Ray reads this variable on import.
os.environ["RAY_AUTH_MODE"] = "token"

# Collect garbage less often in Ray's workers: collections took a fifth of the CPU time of importing torch and vLLM.
if sys.argv[0].endswith("default_worker.py"):
    gc.set_threshold(10_000, *gc.get_threshold()[1:])
