"""The Python API, which `import megarl` exports."""
