"""Checks of a machine: installed packages, hardware and limits, each with a fix for what a run cannot use."""
