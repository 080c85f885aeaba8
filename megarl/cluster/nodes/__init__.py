"""The other nodes of a run: how they join it and report to the driver."""
