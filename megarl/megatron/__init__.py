"""Training with Megatron-core: models, steps, optimizers and checkpoints. No other package imports megatron.core."""

from megarl.megatron.cpu_support import import_uncompiled

import_uncompiled()
