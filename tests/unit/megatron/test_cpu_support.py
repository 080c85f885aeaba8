"""Megatron-core as it is imported on CPU."""

import subprocess
import sys


def test_ranks_do_not_load_torchs_compiler():
    """The ranks' modules are imported in a process of its own, as this one may have the compiler from elsewhere."""
    code = (
        "import sys, torch; compiler = torch.compile\n"
        "import megarl.megatron.workers.actor, megarl.megatron.workers.reward_model\n"
        "assert torch.compile is compiler\n"
        "sys.exit('torch._inductor' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
