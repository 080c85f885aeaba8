"""Sandboxes for programs written by the policy: no network, bounded resources, no processes left behind."""
