"""Checks a machine's installed packages, hardware and limits, and suggests a fix for each problem."""
