"""Import of megatron-core on CPU."""

import subprocess
import sys


def test_workers_do_not_import_the_torch_compiler():
    """The check runs in a new process, because this process may have imported the compiler already."""
    code = (
        "import sys, torch; compiler = torch.compile\n"
        "import megarl.megatron.workers.actor, megarl.megatron.workers.reward_model\n"
        "assert torch.compile is compiler\n"
        "sys.exit('torch._inductor' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
