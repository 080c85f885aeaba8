"""Multi-node runs: how the nodes without the driver join the run and report to the driver."""
