"""Training with Megatron-core: models, steps, optimizers and checkpoints. No other package imports megatron.core.

A holder describes the weights that one rank stores: see megarl.resharding.piece.Holder.
"""

from megarl.megatron.cpu_support import import_uncompiled

import_uncompiled()
