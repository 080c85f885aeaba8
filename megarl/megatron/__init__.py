"""Megatron-core: model, step and optimizer of actor and reference. The only room that imports megatron.core."""

from megarl.megatron.cpu_support import import_uncompiled

import_uncompiled()
