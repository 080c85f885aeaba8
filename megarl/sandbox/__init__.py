"""Programs of a policy, each in a sandbox: without a network, within limits, and gone when it is done."""
